"""The engine's side of a weight sync: vLLM's worker with a few questions more, and how the buckets come to it.

Runs in vLLM's worker processes; imports neither TRL nor DeepSpeed.
"""

import mmap
import select
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from grpo.weights.buckets import NUM_BUFFERS, ParamMeta, packed_places, parted
from grpo.weights.engine_args import BACKENDS
from grpo.weights.nccl import receive
from grpo.weights.reload import CountedReload
from grpo.weights.shm import FILLED


@dataclass
class BucketsInfo(WeightTransferUpdateInfo):
    """What both backends are told of a weight sync, before its first bucket is there."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    """All three of every tensor, in order."""
    sizes: list[int]
    """Tensors of each bucket."""
    timeout_s: float
    """For which a bucket is waited for, at most."""
    held: list[str] = field(default_factory=list)
    """Checkpoint names that this engine has from an earlier weight sync, and that this one leaves out."""
    sums_bits: bool = False
    """Whether what arrives is summed for `check_bits`."""

    def buckets(self) -> list[list[ParamMeta]]:
        return parted(self.names, self.dtype_names, self.shapes, self.sizes)


class AskedWorker:
    """Mixed into vLLM's worker (`worker_extension_cls`): vLLM's weight transfer has no call that answers."""

    weight_transfer_engine: CountedReload
    model_runner: Any
    vllm_config: VllmConfig
    _weight_update_active: bool

    def grpo_wire_format(self, question: dict[str, Any]) -> str:
        return self.weight_transfer_engine.wire_format(question).dumps()

    def grpo_check_bits(self, sent: dict[str, int]) -> None:
        self.weight_transfer_engine.check_bits(sent)

    def grpo_take_adapter(self, number: int, keep: list[int]) -> None:
        self.weight_transfer_engine.take_adapter(self.model_runner.lora_manager, number, keep)

    def grpo_end_weight_update(self) -> None:
        """As vLLM's `finish_weight_update`, which drops all adapters besides (0.31, `reset_lora_state`): their tensors
        stand beside the base's, and no reload touches them."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.finish_weight_update()
            self.weight_transfer_engine.reset_weight_update_target()
            self._weight_update_active = False


class CountedNCCLEngine(CountedReload, NCCLWeightTransferEngine):
    """vLLM's own NCCL engine, counted."""

    update_info_cls = BucketsInfo

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        if self.model_update_group is not None:  # the trainer opens a new one, for another engine has been replaced
            self.model_update_group.destroy()
        super().init_transfer_engine(init_info)
        # vLLM goes on without NCCL when it cannot load it; a weight sync would then "receive" uninitialised memory.
        if getattr(self.model_update_group, "disabled", False):
            raise RuntimeError("vLLM could not load NCCL in the engine: set vllm_sync_backend to 'shm', or mend NCCL")

    def receive_weights(self, update_info: BucketsInfo) -> None:
        assert self.model_update_group is not None, "receive_weights before init_transfer_engine"
        self.note_received(update_info.names, update_info.held, sums_bits=update_info.sums_bits)
        receive(self.model_update_group, update_info.buckets(), self.load, self.device)


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Where the trainer's buffers and pipes are: unnamed files, opened through the trainer's /proc entry."""

    path: str
    """Of the buffers."""
    num_bytes: int
    filled: list[str]
    """By worker of the node: the pipe that says when the next bucket is there."""
    taken: str
    """The pipe into which a worker writes its number when it has read a bucket."""
    rank_offset: int
    """1 + the number of this engine's first worker, as vLLM counts ranks where the trainer is rank 0."""


class CountedShmEngine(CountedReload, WeightTransferEngine[ShmInitInfo, BucketsInfo]):
    """Reads parameters out of memory shared with the trainer: for CPUs, and for nodes whose NCCL does not serve."""

    init_info_cls = ShmInitInfo
    update_info_cls = BucketsInfo
    _buffers: Sequence[torch.Tensor] = ()  # [bytes] uint8
    _filled_pipe: FileIO | None = None
    _taken_pipe: FileIO | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        self.shutdown()  # the trainer opens a new group, for another engine has been replaced
        self._number = init_info.rank_offset - 1 + self.parallel_config.rank
        self._filled_pipe = FileIO(init_info.filled[self._number], "r")
        self._taken_pipe = FileIO(init_info.taken, "w")
        with FileIO(init_info.path, "r") as file:
            mapped = mmap.mmap(file.fileno(), init_info.num_bytes, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is copied from only
            self._buffers = torch.frombuffer(mapped, dtype=torch.uint8).chunk(NUM_BUFFERS)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends with torch.accelerator.synchronize(), which raises without an accelerator (vLLM 0.31).
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: BucketsInfo) -> None:
        assert self._taken_pipe is not None, "receive_weights before init_transfer_engine"
        self.note_received(update_info.names, update_info.held, sums_bits=update_info.sums_bits)
        for number, metas in enumerate(update_info.buckets()):
            self._wait_filled(update_info.timeout_s)
            places = packed_places(self._buffers[number % NUM_BUFFERS], metas)
            # Copies: the layer-wise reload keeps references until a whole layer has arrived, and the trainer fills
            # this buffer again before that. Without them weights are wrong and nothing says so.
            copies = [(meta.name, self._copied(place)) for meta, place in zip(metas, places, strict=True)]
            self._synchronize()
            self._taken_pipe.write(bytes([self._number]))
            self.load(copies)
        self._synchronize()

    def _copied(self, place: torch.Tensor) -> torch.Tensor:
        return place.to(self.device, copy=True)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _wait_filled(self, timeout_s: float) -> None:
        """Raises TimeoutError, or ConnectionError where the trainer has given the weight sync up or is gone."""
        assert self._filled_pipe is not None
        poll = select.poll()
        poll.register(self._filled_pipe, select.POLLIN)
        if not poll.poll(min(1000 * timeout_s, 2**31 - 1)):
            raise TimeoutError(f"the trainer's next bucket did not come within {timeout_s:.0f} s")
        if self._filled_pipe.read(1) != FILLED:
            raise ConnectionError("the trainer has given the weight sync up")

    def shutdown(self) -> None:
        for end in (self._filled_pipe, self._taken_pipe):
            if end is not None:
                end.close()
        self._buffers, self._filled_pipe, self._taken_pipe = (), None, None


WeightTransferEngineFactory.register_engine(BACKENDS["nccl"], CountedNCCLEngine)
WeightTransferEngineFactory.register_engine(BACKENDS["shm"], CountedShmEngine)
