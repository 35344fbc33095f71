"""Bits that change on the way from a packed buffer to vLLM's loaders end the weight sync by the tensor's name.

Both transports and both of our engines' sides run over vLLM's own reload; between them faults are put in.
"""

import re
import threading
from collections.abc import Callable, Iterable
from functools import partial
from io import FileIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from grpo.engine.client import EngineError
from grpo.weights import sync
from grpo.weights.buckets import NUM_BUFFERS
from grpo.weights.page_sums import PAGE_BYTES
from grpo.weights.sync import WeightSyncer
from grpo.weights.worker import BucketsInfo, CountedNCCLEngine, CountedShmEngine, ShmInitInfo
from tests.support.engines import Script, ScriptedEngine, agree
from tests.support.nccl_stand_in import EngineEnd, MadeUpSource, StandInTransport, Wire, only_streams_stand_in

NUM_BUCKETS = 3 * NUM_BUFFERS
HIT = 1  # the bucket, from 0, to which something happens
NAME = f"bucket{HIT}.0"
OTHER_BITS = rf"1 tensors \[GRPO-506\]: {NAME}: other bits arrived than were sent"
USED_AGAIN = rf"GRPO-506\]: {NAME}: its memory was used again between its arrival and its loading"

Fault = Callable[[torch.Tensor], None]


def drop(bucket: torch.Tensor) -> None:
    """What stood there before stays."""
    bucket[PAGE_BYTES : 2 * PAGE_BYTES] = 0


def repeat(bucket: torch.Tensor) -> None:
    bucket[PAGE_BYTES : 2 * PAGE_BYTES] = bucket[:PAGE_BYTES]


def swap(bucket: torch.Tensor) -> None:
    one, two = bucket[:PAGE_BYTES].clone(), bucket[PAGE_BYTES : 2 * PAGE_BYTES].clone()
    bucket[:PAGE_BYTES], bucket[PAGE_BYTES : 2 * PAGE_BYTES] = two, one


FAULTS = [drop, repeat, swap]


class Layers(nn.Module):
    """What three buckets bring, each third one, is a layer: vLLM loads nothing of it before all of it is there."""

    def __init__(self, source: MadeUpSource) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(NUM_BUFFERS))
        for name, tensor in source.tensors.items():
            layer, leaf = self._place(name)
            layer.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))

    def _place(self, name: str) -> tuple[nn.Module, str]:
        bucket, _, part = name.removeprefix("bucket").partition(".")
        return self.layers[int(bucket) % NUM_BUFFERS], f"w{bucket}_{part}"

    def value(self, name: str) -> torch.Tensor:
        layer, leaf = self._place(name)
        return getattr(layer, leaf)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            parameter = self.value(name)
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


class FaultyWire(Wire):
    """NCCL between two GPUs: what the workers receive may be other than what was sent, at once or later."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.fault: Fault | None = None
        self.is_late = False
        self._received: list[torch.Tensor] = []

    def has_arrived(self, packed: torch.Tensor) -> None:
        self._received.append(packed)
        if self.fault is not None and len(self._received) == HIT + 1 and not self.is_late:
            self.fault(packed)


class FaultyNccl(CountedNCCLEngine):
    """A receive buffer of which a part is used again while the layer still waits for its other tensors."""

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        wire: Any = self.model_update_group._wire  # type: ignore[union-attr]
        super().load(weights)
        if wire.fault is not None and wire.is_late and weights[0][0] == NAME:
            wire.fault(wire._received[HIT])


class AfterLoading:
    """A worker's word that it has read a bucket, held back until it has loaded it."""

    def __init__(self, pipe: FileIO) -> None:
        self._pipe, self._held = pipe, bytearray()

    def write(self, word: bytes) -> None:
        self._held += word

    def let_go(self) -> None:
        self._pipe.write(self._held)
        self._held.clear()

    def close(self) -> None:
        self._pipe.close()


class FaultyShm(CountedShmEngine):
    """Memory that shows a worker other pages than the trainer has written, or an engine that does not copy them."""

    fault: Fault | None = None
    copies = True

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        super().init_transfer_engine(init_info)
        assert self._taken_pipe is not None
        self._word: Any = AfterLoading(self._taken_pipe)
        self._taken_pipe = self._word

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        super().load(weights)
        self._word.let_go()  # earlier, one that does not copy would see the next bucket arrive in its place

    def _wait_filled(self, timeout_s: float) -> None:
        super()._wait_filled(timeout_s)
        self._num_filled = getattr(self, "_num_filled", 0) + 1

    def _copied(self, place: torch.Tensor) -> torch.Tensor:
        copy = super()._copied(place) if self.copies else place
        if self.fault is not None and self._num_filled == HIT + 1 and place.numel() > PAGE_BYTES:
            self.fault(copy.view(torch.uint8))
        return copy


class Stack:
    """A syncer of made-up weights, and a worker with a model behind it."""

    def __init__(self, backend: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> None:
        self.source = MadeUpSource(NUM_BUCKETS, dtype)
        self.model = Layers(self.source)
        record_metadata_for_reloading(self.model)
        self.wire, self._lock = FaultyWire(), threading.Lock()
        self.worker: Any = object.__new__(FaultyNccl if backend == "nccl" else FaultyShm)  # it wants an engine
        self.worker.model, self.worker.device = self.model, torch.device("cpu")
        self.worker.model_config = SimpleNamespace(dtype=dtype, hf_text_config=SimpleNamespace())
        self.worker.model_update_group = EngineEnd(self.wire)
        self.worker.parallel_config = SimpleNamespace(rank=0)
        only_streams_stand_in(monkeypatch)
        monkeypatch.setitem(sync.TRANSPORTS, "nccl", partial(StandInTransport, self.wire))
        self.engine = ScriptedEngine(script=Script(control=self._control))
        self.syncer = WeightSyncer(
            self.source,  # type: ignore[arg-type]
            [self.engine],
            backend=backend,
            tensor_parallel_size=1,
            timeout_s=30.0,
        )
        self.syncer.connect()

    def _control(self, method: str, kwargs: dict[str, Any]) -> Any:
        try:
            with self._lock:  # a worker does one thing at a time
                self._do(method, kwargs)
        except RuntimeError as error:
            raise EngineError(f"failed: {type(error).__name__}: {error}") from error
        return agree(method, kwargs)

    def _do(self, method: str, kwargs: dict[str, Any]) -> None:
        match method:
            case "init_weight_transfer_engine":
                self.worker.init_transfer_engine(ShmInitInfo(**kwargs["init_info"]))
            case "start_weight_update":
                self.worker.start_weight_update()
            case "update_weights":
                self.worker.receive_weights(BucketsInfo(**kwargs["update_info"]))
            case "finish_weight_update":
                self.worker.finish_weight_update()
            case "check_bits":
                self.worker.check_bits(**kwargs)

    def put_in(self, fault: Fault) -> None:
        self.wire.fault = self.worker.fault = fault

    def sync(self, *, checks_bits: bool = True) -> str:
        """What went wrong."""
        _, error = self.syncer.sync(1, checks_bits=checks_bits)
        return str(error or "")

    def wrong(self) -> list[str]:
        """Names of what the engine computes with that is not the trainer's."""
        return [name for name, sent in self.source.tensors.items() if not torch.equal(self.model.value(name), sent)]


@pytest.fixture(params=["nccl", "shm"])
def stack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stack:
    return Stack(request.param, monkeypatch)


@pytest.mark.parametrize("backend", ["nccl", "shm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # parts of odd sizes: nothing is aligned to words
def test_check_bits_with_intact_weights_passes(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(backend, monkeypatch, dtype)
    for _ in range(2):
        for tensor in stack.source.tensors.values():
            tensor.mul_(2)
        assert stack.sync() == ""
        assert stack.wrong() == []
        sums = stack.worker._sums
        assert sums._loaded.keys() == sums._arrived.keys() == stack.source.tensors.keys()
    assert [method for method, _ in stack.engine.calls[-3:]] == [
        "finish_weight_update", "check_bits", "reset_prefix_cache"
    ]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_check_bits_with_corrupted_page_names_tensor(stack: Stack, fault: Fault) -> None:
    stack.put_in(fault)
    assert re.search(OTHER_BITS, stack.sync())


@pytest.mark.parametrize("fault", FAULTS)
def test_check_bits_with_reused_receive_buffer_names_tensor(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack("nccl", monkeypatch)
    stack.put_in(fault)
    stack.wire.is_late = True
    assert re.search(USED_AGAIN, stack.sync())


def test_check_bits_without_copy_from_shared_memory_names_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer fills the buffer again while the layer still waits for its other tensors."""
    stack = Stack("shm", monkeypatch)
    stack.worker.copies = False
    assert re.search(r"18 tensors \[GRPO-506\]: bucket0\.0: its memory was used again", stack.sync())


@pytest.mark.parametrize("is_late", [False, True])
def test_weight_sync_without_check_bits_misses_wrong_bits(stack: Stack, is_late: bool) -> None:
    """The tests above can fail."""
    stack.put_in(drop)
    stack.wire.is_late = is_late
    assert stack.sync(checks_bits=False) == ""
    assert stack.wrong() == [NAME]
    assert stack.worker._sums is None
    assert "check_bits" not in [method for method, _ in stack.engine.calls]
