"""The engine's side of a weight sync: extensions of vLLM's worker, and the receiving transports.

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
    """Announcement of a weight sync to a worker, for both backends, before its first bucket."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    """Names, dtypes and shapes of all tensors, in order."""
    sizes: list[int]
    """Number of tensors in each bucket."""
    timeout_s: float
    """Longest wait for a bucket."""
    held: list[str] = field(default_factory=list)
    """Checkpoint names left out of this weight sync: the engine holds them."""
    sums_bits: bool = False
    """Checksum received tensors for `check_bits`."""

    def buckets(self) -> list[list[ParamMeta]]:
        return parted(self.names, self.dtype_names, self.shapes, self.sizes)


class AskedWorker:
    """Mixin for vLLM's worker (`worker_extension_cls`): adds RPCs that return a value, which vLLM's weight transfer
    lacks."""

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
        """Finish as vLLM's `finish_weight_update`, but keep adapters: it drops them all (0.31, `reset_lora_state`),
        although their tensors are separate from the base's, and no reload touches them."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.finish_weight_update()
            self.weight_transfer_engine.reset_weight_update_target()
            self._weight_update_active = False


class CountedNCCLEngine(CountedReload, NCCLWeightTransferEngine):
    """vLLM's NCCL engine with the counted reload."""

    update_info_cls = BucketsInfo

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        if self.model_update_group is not None:  # the trainer opens a new one, because another engine was replaced
            self.model_update_group.destroy()
        super().init_transfer_engine(init_info)
        # If vLLM cannot load NCCL it continues without; a weight sync would then "receive" uninitialised memory.
        if getattr(self.model_update_group, "disabled", False):
            raise RuntimeError("vLLM could not load NCCL in the engine: set vllm_sync_backend to 'shm', or mend NCCL")

    def receive_weights(self, update_info: BucketsInfo) -> None:
        assert self.model_update_group is not None, "receive_weights before init_transfer_engine"
        self.note_received(update_info.names, update_info.held, sums_bits=update_info.sums_bits)
        receive(self.model_update_group, update_info.buckets(), self.load, self.device)


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Paths of the trainer's buffers and pipes: anonymous files, opened through the trainer's /proc entry."""

    path: str
    """Path of the buffers."""
    num_bytes: int
    filled: list[str]
    """Pipe of each worker of the node: announces filled buckets."""
    taken: str
    """Pipe into which a worker writes its number after reading a bucket."""
    rank_offset: int
    """Number of this engine's first worker, plus 1 as in vLLM, where the trainer is rank 0."""


class CountedShmEngine(CountedReload, WeightTransferEngine[ShmInitInfo, BucketsInfo]):
    """Reads parameters from memory shared with the trainer: for CPUs, and for nodes where NCCL does not work."""

    init_info_cls = ShmInitInfo
    update_info_cls = BucketsInfo
    _buffers: Sequence[torch.Tensor] = ()  # [bytes] uint8
    _filled_pipe: FileIO | None = None
    _taken_pipe: FileIO | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        self.shutdown()  # the trainer opens a new group, because another engine was replaced
        self._number = init_info.rank_offset - 1 + self.parallel_config.rank
        self._filled_pipe = FileIO(init_info.filled[self._number], "r")
        self._taken_pipe = FileIO(init_info.taken, "w")
        with FileIO(init_info.path, "r") as file:
            mapped = mmap.mmap(file.fileno(), init_info.num_bytes, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
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
            # Copies: the layer-wise reload keeps references until a whole layer has arrived, and the trainer refills
            # this buffer before that. Without copies, weights would be silently wrong.
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
        """Wait for the next bucket. Raises TimeoutError, or ConnectionError if the trainer has given up or is gone."""
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
