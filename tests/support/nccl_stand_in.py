"""The NCCL transport without NCCL: its real code at both ends; only the wire between them stands in.

Runs with torch alone, on CPUs and on one GPU. A broadcast takes place late, on the stream that it is given, as NCCL's
does: whoever fills a buffer again before its broadcast is over changes what arrives.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from grpo.engine.client import EngineError
from grpo.weights.buckets import Bucket, ParamMeta, packed_bytes, parted
from grpo.weights.nccl import NcclTransport, receive
from grpo.weights.page_sums import ArrivedSums
from tests.support.engines import Script, ScriptedEngine

LATE_S = 0.02  # from a broadcast's turn on its stream until it reads the buffer
LATE_CYCLES = 40_000_000  # likewise on a GPU: about that time at 2 GHz
WIRE_S = 30.0  # until a worker gives up waiting for the trainer


class CpuStream:
    """Runs what it is given in order, in a thread of its own: what a CUDA stream is to the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)

    def run(self, work: Callable[[], None]) -> Future[None]:
        return self._thread.submit(work)

    def wait_stream(self, stream: Any) -> None:
        """On CPUs what fills a buffer has run when it returns."""

    def record_event(self) -> "CpuEvent":
        return CpuEvent(self.run(lambda: None))

    def wait_event(self, event: "CpuEvent") -> None:
        event.over.result()

    def synchronize(self) -> None:
        self.run(lambda: None).result()

    def __enter__(self) -> None:
        """As `torch.cuda.stream(stream)`."""

    def __exit__(self, *error: Any) -> None: ...


class CpuEvent(NamedTuple):
    """Of a `CpuStream`."""

    over: Future[None]

    def query(self) -> bool:
        return self.over.done()


class Wire:
    """What the trainer has put on its way, in order, and when it is there."""

    def __init__(self, device: str, *, fails_at: int | None = None, holds: bool = False) -> None:
        self.device = device
        self.fails_at = fails_at
        """The number of the broadcast, from 0, that raises, as NCCL does of a lost peer."""
        self.holds = holds
        """Whether the first broadcast holds its caller until `destroy`, as NCCL's does without its peers."""
        self.destroyed = threading.Event()
        self.num_sent = 0
        self._sent: queue.Queue[tuple[torch.Tensor, Callable[[], None]]] = queue.Queue()

    # -- the trainer's end: vLLM's PyNcclCommunicator -------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        assert (src, tensor.dtype, tensor.dim()) == (0, torch.uint8, 1)
        if self.holds:
            self.destroyed.wait(WIRE_S)
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        if self.num_sent == self.fails_at:
            raise RuntimeError("NCCL error: unhandled system error")
        self.num_sent += 1
        if self.device == "cpu":
            sent = torch.empty_like(tensor)  # in place of the engine's memory

            def copy() -> None:
                time.sleep(LATE_S)
                sent.copy_(tensor)

            copied = stream.run(copy)
            self._sent.put((sent, copied.result))
            return
        with torch.cuda.stream(stream):  # memory is taken here too: elsewhere others would get it before it is written
            torch.cuda._sleep(LATE_CYCLES)
            sent = tensor.clone()
        event = stream.record_event()
        self._sent.put((sent, lambda: torch.cuda.current_stream().wait_event(event)))

    def destroy(self) -> None:
        self.destroyed.set()

    # -- the engine's end -----------------------------------------------------------------------------------------

    def receive(self, tensor: torch.Tensor, stream: Any) -> None:
        if self.device == "cpu":

            def copy() -> None:
                sent, until_there = self._sent.get(timeout=WIRE_S)
                until_there()
                tensor.copy_(sent)
                self.has_arrived(tensor)

            stream.run(copy)
            return
        sent, until_there = self._sent.get(timeout=WIRE_S)
        with torch.cuda.stream(stream):
            until_there()
            tensor.copy_(sent)
            sent.record_stream(stream)
            self.has_arrived(tensor)

    def has_arrived(self, packed: torch.Tensor) -> None:
        """[bytes] uint8, in the receiver's memory; for tests that do something to it."""


class EngineEnd:
    """The same of the engine's end.

    Args:
        dies_at: the number of the bucket, from 0, at which the engine is gone.
    """

    def __init__(self, wire: Wire, dies_at: int | None = None) -> None:
        self._wire, self._dies_at, self._num_asked = wire, dies_at, 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        if self._num_asked == self._dies_at:
            raise EngineError("was killed by signal 9")
        self._num_asked += 1
        self._wire.receive(tensor, stream)


class StandInTransport(NcclTransport):
    """The real transport over a wire of ours."""

    def __init__(self, wire: Wire, *, buffer_bytes: int, num_workers: int = 1) -> None:
        self.device = wire.device
        super().__init__(buffer_bytes=buffer_bytes, num_workers=num_workers)
        self._wire = wire

    def open(self, engines: Any, on_refusal: Any) -> None:
        self._communicator = self._wire


class StandInEngine(ScriptedEngine):
    """With the workers' side of the transport behind it.

    Args:
        answers_early: before anything has arrived; the engine that must not be.
        dies_at: the number of the bucket, from 0, at which it fails.
        hangs: whether it answers no update; the client's deadline passes.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        answers_early: bool = False,
        dies_at: int | None = None,
        hangs: bool = False,
    ) -> None:
        super().__init__(script=Script(control=self._answer))
        self._wire = wire
        self._late = ThreadPoolExecutor(max_workers=1)  # takes up updates in order where they are answered early
        self._answers_early, self._dies_at, self._hangs = answers_early, dies_at, hangs
        self.arrived: dict[str, torch.Tensor] = {}
        self.fault: Callable[[torch.Tensor], None] = lambda packed: None
        """What happens to each packed buffer, [bytes] uint8, when it has arrived."""
        self._sums = ArrivedSums()
        self._timeout_s = 0.0

    def methods(self) -> list[str]:
        """What it was asked, in order."""
        return [method for method, _ in self.calls]

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        self._timeout_s = timeout_s
        return super().call(method, timeout_s, **kwargs)

    def _answer(self, method: str, kwargs: dict[str, Any]) -> bool:
        if method == "start_weight_update":
            self._sums = ArrivedSums()
        if method == "check_bits" and (lines := self._sums.changed(kwargs["sent"])):
            raise EngineError("; ".join(lines))
        if method != "update_weights":
            return True
        if self._hangs:
            self._wire.destroyed.wait(self._timeout_s)
            raise EngineError(f"did not answer update_weights within {self._timeout_s:.0f} s")
        if self._answers_early:
            self._late.submit(self._consume, kwargs["update_info"])
        else:
            self._consume(kwargs["update_info"])
        return True

    def finish(self) -> None:
        """Until all that was sent has been taken up."""
        self._late.shutdown()

    def _consume(self, update: dict[str, Any]) -> None:
        buckets = parted(*(update[name] for name in ("names", "dtype_names", "shapes", "sizes")))
        take = partial(self._take, update["sums_bits"])
        try:
            receive(EngineEnd(self._wire, self._dies_at), buckets, take, self._wire.device)
        except queue.Empty:
            raise EngineError("the trainer's broadcast did not come") from None
        if self._wire.device != "cpu" and not self._answers_early:
            torch.cuda.synchronize()  # as vLLM's base class does before it answers

    def _take(self, sums_bits: bool, tensors: list[tuple[str, torch.Tensor]]) -> None:
        storage = tensors[0][1].untyped_storage()
        self.fault(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        for name, tensor in tensors if sums_bits else ():
            self._sums.arrive(name, tensor)
        self.arrived.update((name, tensor.clone()) for name, tensor in tensors)


def only_streams_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of torch needs a GPU, on a machine without one."""
    for name, stand_in in (
        ("Stream", CpuStream),
        ("current_stream", CpuStream),
        ("set_stream", lambda stream: None),
        ("stream", lambda stream: stream),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


class MadeUpSource:
    """Buckets of random tensors in place of a model: `num_buckets` of a few odd-sized tensors each.

    Every `fill` counts, also of a rank that keeps nothing.
    """

    takes_images = False

    def __init__(self, num_buckets: int, dtype: torch.dtype, *, elements: int = 30_001, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        buckets = []
        for number in range(num_buckets):
            sizes = (elements + number, 1, 7 * (number + 1))  # odd and even
            metas = tuple(ParamMeta(f"bucket{number}.{part}", dtype, (size,)) for part, size in enumerate(sizes))
            for meta in metas:
                self.tensors[meta.name] = torch.randn(meta.shape, generator=draw).to(dtype).to(device)
            buckets.append(Bucket(parameters=(), metas=metas))
        num_bytes = [sum(self.tensors[meta.name].nbytes for meta in bucket.metas) for bucket in buckets]
        self.buffer_bytes = max(packed_bytes(bucket.metas) for bucket in buckets)  # in shared memory there are gaps
        self._plan = SimpleNamespace(buckets=tuple(buckets), held=(), num_bytes=sum(num_bytes))
        self.num_fills = 0
        self.has_adapters = False

    def meet(self, *, receives: bool) -> None: ...

    def plan(self) -> Any:
        return self._plan

    def mark_sent(self) -> None: ...

    def end_sync(self) -> None: ...

    def fill(self, bucket: Bucket, places: list[torch.Tensor] | None) -> None:
        self.num_fills += 1
        for meta, place in zip(bucket.metas, places or [], strict=places is not None):
            place.copy_(self.tensors[meta.name])
