"""The NCCL transport on real streams, at both ends of a wire of ours; torch alone.

On a GPU a broadcast is a long sleep and then a copy, both on the stream that the transport gives: what fills a buffer
again too early, or reads one that is not filled yet, shows as other bits. On CPU, threads stand for streams.
"""

import statistics
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo.engine.client import EngineError
from grpo.weights import sync
from grpo.weights.buckets import NUM_BUFFERS, Bucket, ParamMeta
from grpo.weights.page_sums import PAGE_BYTES, page_sum
from grpo.weights.sync import WeightSyncer, WeightSyncReport
from tests.support.nccl_stand_in import (
    MadeUpSource,
    StandInEngine,
    StandInTransport,
    Wire,
    only_streams_stand_in,
)

NUM_BUCKETS = 24
FAILS_AT = 3
EMBEDDING = (152_064, 3584)  # Qwen2.5-7B's, the largest parameter and so the size of a buffer
MODEL_BYTES = 15_231_233_024

Figure = Callable[[str, float, str], None]


@pytest.fixture(autouse=True)
def _streams(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        only_streams_stand_in(monkeypatch)


class WeightSync:
    """A syncer over one wire to one engine, both of which are there for this test."""

    def __init__(self, source: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch, **engine: Any) -> None:
        self.engine = StandInEngine(wire, **engine)
        monkeypatch.setitem(sync.TRANSPORTS, "nccl", partial(StandInTransport, wire))
        clients: list[Any] = [self.engine]
        self.syncer = WeightSyncer(source, clients, backend="nccl", tensor_parallel_size=1, timeout_s=60.0)
        self.syncer.connect()

    def run(self, version: int = 1, *, checks_bits: bool = False) -> tuple[WeightSyncReport, EngineError | None]:
        return self.syncer.sync(version, checks_bits=checks_bits)


def different(source: MadeUpSource, engine: StandInEngine) -> list[str]:
    """Names of what did not arrive bit by bit."""
    return [
        name
        for name, tensor in source.tensors.items()
        if name not in engine.arrived
        or not torch.equal(engine.arrived[name].view(torch.uint8), tensor.view(torch.uint8))
    ]


def made_up(dtype: torch.dtype, device: torch.device) -> MadeUpSource:
    elements = 30_001 if device.type == "cpu" else 5_000_001
    return MadeUpSource(NUM_BUCKETS, dtype, elements=elements, device=device.type)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_nccl_transport_delivers_equal_bits(
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    figure: Figure,
) -> None:
    source = made_up(dtype, device)
    one = WeightSync(source, Wire(device.type), monkeypatch)
    for version in (1, 2):  # the second with buffers made anew
        one.engine.arrived.clear()
        report, error = one.run(version)
        assert error is None
        assert different(source, one.engine) == []
    figure("bit-equal in each of two weight syncs", report.num_bytes / 1e6, "MB")


def test_page_sum_is_equal_on_every_device(device: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (6 * PAGE_BYTES + 99,), dtype=torch.uint8, generator=draw)
    there = memory.to(device)
    for begin in (0, 1, 2, 8, PAGE_BYTES):  # words that are aligned, and words that are not
        for end in (begin + 3, begin + PAGE_BYTES, len(memory) - 2):
            assert page_sum(there[begin:end]).item() == page_sum(memory[begin:end]).item(), (begin, end)


@pytest.mark.parametrize("fault", ["drop", "repeat", "swap"])
def test_check_of_bits_with_changed_page_names_tensor(
    fault: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are queued on the streams on which buckets are filled and received."""
    source = made_up(torch.bfloat16, device)
    one = WeightSync(source, Wire(device.type), monkeypatch)
    _, error = one.run(checks_bits=True)
    assert error is None
    pages = [slice(number * PAGE_BYTES, (number + 1) * PAGE_BYTES) for number in range(2)]

    def change(packed: torch.Tensor) -> None:
        first, second = (packed[page].clone() for page in pages)
        packed[pages[1]] = {"drop": torch.zeros_like(second), "repeat": first, "swap": first}[fault]
        if fault == "swap":
            packed[pages[0]] = second

    one.engine.fault = change
    _, error = one.run(2, checks_bits=True)
    assert "bucket0.0: other bits arrived than were sent" in str(error)


def test_check_of_bits_measures_time(device: torch.device, monkeypatch: pytest.MonkeyPatch, figure: Figure) -> None:
    source = made_up(torch.bfloat16, device)
    one = WeightSync(source, Wire(device.type), monkeypatch)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for version in range(2 + 10):  # the first two are not counted
        report, error = one.run(version, checks_bits=version % 2 == 1)
        assert error is None
        if version > 1:
            seconds[version % 2 == 1].append(report.total_s)
    without, with_sums = (statistics.median(seconds[checks]) for checks in (False, True))
    figure("a weight sync without it", 1e3 * without, "ms")
    figure("a weight sync with it", 1e3 * with_sums, "ms")


def test_nccl_transport_with_early_answer_delivers_wrong_weights(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    """The test above can fail: a buffer is filled again while its broadcast still waits on the stream."""
    source = made_up(torch.bfloat16, device)
    one = WeightSync(source, Wire(device.type), monkeypatch, answers_early=True)
    _, error = one.run()
    one.engine.finish()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert error is None
    assert len(one.engine.arrived) == len(source.tensors)
    wrong = len(different(source, one.engine))
    figure(f"wrong of {len(source.tensors)} tensors", wrong, "")
    assert wrong > NUM_BUCKETS / 2


def test_sync_with_failed_broadcast_returns_error_after_all_fills(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made_up(torch.bfloat16, device)
    broken = WeightSync(source, Wire(device.type, fails_at=FAILS_AT), monkeypatch)
    _, error = broken.run()
    assert isinstance(error, EngineError)
    assert "NCCL error: unhandled system error" in str(error)
    assert source.num_fills == NUM_BUCKETS  # the other ranks gather with this one
    _, again = broken.run(2)
    assert again is not None, "what is broken was used again"
    assert source.num_fills == 2 * NUM_BUCKETS

    fresh = WeightSync(source, Wire(device.type), monkeypatch)
    _, error = fresh.run(3)
    assert error is None
    assert different(source, fresh.engine) == []


class SameShapes:
    """As many bytes as a model of 7B has, in buckets as large as its embedding, of which only one is ever there."""

    def __init__(self, device: torch.device, scale: int) -> None:
        shape = (EMBEDDING[0] // scale, EMBEDDING[1])
        self.buffer_bytes = 2 * shape[0] * shape[1]
        count = max(4, MODEL_BYTES // self.buffer_bytes // scale)
        buckets = [
            Bucket(parameters=(), metas=(ParamMeta(f"w{number}", torch.bfloat16, shape),)) for number in range(count)
        ]
        self._plan = SimpleNamespace(buckets=tuple(buckets), held=(), num_bytes=count * self.buffer_bytes)
        self.most_bytes = 0
        self._device = device
        self.has_adapters = False
        self.takes_images = False

    def plan(self) -> Any:
        return self._plan

    def meet(self, *, receives: bool) -> None: ...

    def mark_sent(self) -> None: ...

    def end_sync(self) -> None: ...

    def fill(self, bucket: Bucket, places: list[torch.Tensor] | None) -> None:
        for place in places or []:
            place.fill_(1.0)


class Forgets(dict):
    """An engine that keeps nothing: its memory is another GPU's."""

    def update(self, tensors: Any) -> None:  # type: ignore[override]
        for _, tensor in tensors:
            assert tensor[0, 0].item() == 1.0


def allocated(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_sync_of_7b_model_frees_its_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    """Beside a trainer that has filled its GPU: nothing from the connection on, the packed buffers during a weight sync
    alone.

    The wire and the consumer hold a buffer each, and what was unpacked, in place of another GPU's memory.
    """
    source: Any = SameShapes(device, scale=1 if device.type == "cuda" else 500)
    if device.type == "cuda":
        space, needs = torch.cuda.mem_get_info()[0], 8 * source.buffer_bytes
        if space < needs:
            pytest.skip(f"needs {needs / 2**30:.0f} GiB of free GPU memory (this one has {space / 2**30:.0f})")
    before = allocated(device)
    one = WeightSync(source, Wire(device.type), monkeypatch)
    one.engine.arrived = Forgets()
    connected = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    report, error = one.run()
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    after = allocated(device)
    assert error is None
    assert report.num_bytes == source.plan().num_bytes
    figure("a buffer", source.buffer_bytes / 2**30, "GiB")
    figure("held once connected", (connected - before) / 2**30, "GiB")
    figure("during a weight sync, the stand-ins' part included", (most - before) / 2**30, "GiB")
    figure("after it", (after - before) / 2**30, "GiB")
    small = 2**24
    assert connected - before < small
    assert after - before < small
    assert most - before < (NUM_BUFFERS + 4) * source.buffer_bytes + small
