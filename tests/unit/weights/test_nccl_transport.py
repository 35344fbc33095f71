"""The NCCL transport end to end, without NCCL: what arrives, what a fault leaves, and that every wait ends."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from grpo.engine.client import EngineError
from grpo.place.timeouts import Timeouts
from grpo.weights import sender, sync
from grpo.weights.sync import WeightSyncer
from tests.support.nccl_stand_in import MadeUpSource, StandInEngine, StandInTransport, Wire, only_streams_stand_in

NUM_BUCKETS = 24


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    only_streams_stand_in(monkeypatch)


Connect = Callable[..., tuple[WeightSyncer, StandInEngine, list[EngineError]]]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """A syncer over one wire to one engine; and what was reported at once."""

    def connect(
        source: MadeUpSource, wire: Wire, timeout_s: float = 30.0, **engine: Any
    ) -> tuple[WeightSyncer, StandInEngine, list[EngineError]]:
        reported: list[EngineError] = []
        stand_in = StandInEngine(wire, **engine)
        monkeypatch.setitem(sync.TRANSPORTS, "nccl", partial(StandInTransport, wire))
        syncer = WeightSyncer(
            source,  # type: ignore[arg-type]
            [stand_in],
            backend="nccl",
            tensor_parallel_size=1,
            timeout_s=timeout_s,
            on_trouble=reported.append,
        )
        syncer.connect()
        return syncer, stand_in, reported

    return connect


def different(source: MadeUpSource, engine: StandInEngine) -> list[str]:
    """Names of what did not arrive bit by bit."""
    as_bytes = {name: tensor.view(torch.uint8) for name, tensor in engine.arrived.items()}
    return [
        name
        for name, tensor in source.tensors.items()
        if name not in as_bytes or not torch.equal(as_bytes[name], tensor.view(torch.uint8))
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nccl_transport_delivers_bit_equal_weights(connected: Connect, dtype: torch.dtype) -> None:
    source = MadeUpSource(NUM_BUCKETS, dtype)
    syncer, engine, _ = connected(source, Wire("cpu"))
    report, error = syncer.sync(1)
    assert error is None
    assert different(source, engine) == []
    assert report.num_bytes == sum(tensor.nbytes for tensor in source.tensors.values())
    assert engine.methods()[-2:] == ["finish_weight_update", "reset_prefix_cache"]


def test_nccl_engine_answering_early_gets_wrong_weights(connected: Connect) -> None:
    """The test above can fail: a buffer is filled again when its broadcast is over, or nobody takes any more."""
    source = MadeUpSource(NUM_BUCKETS, torch.float32)
    syncer, engine, _ = connected(source, Wire("cpu"), answers_early=True)
    _, error = syncer.sync(1)
    engine.finish()
    assert error is None
    assert len(engine.arrived) == len(source.tensors)
    assert len(different(source, engine)) > NUM_BUCKETS / 2


def test_nccl_buffers_exist_only_during_sync(connected: Connect) -> None:
    source = MadeUpSource(NUM_BUCKETS, torch.bfloat16)
    syncer, _, _ = connected(source, Wire("cpu"))
    transport = syncer._transport
    assert isinstance(transport, StandInTransport)
    held: list[int] = []
    fill = source.fill

    def watched(bucket: Any, places: Any) -> None:
        held.append(sum(buffer.nbytes for buffer in transport._buffers.values()))
        fill(bucket, places)

    source.fill = watched  # type: ignore[method-assign]
    for version in (1, 2):
        assert transport._buffers == {}
        _, error = syncer.sync(version)
        assert error is None
    assert transport._buffers == {}
    assert max(held) == sender.NUM_BUFFERS * source.buffer_bytes


def test_nccl_broadcast_failure_ends_sync_after_all_buckets_filled(connected: Connect) -> None:
    source = MadeUpSource(NUM_BUCKETS, torch.float32)
    wire = Wire("cpu", fails_at=3)
    syncer, engine, _ = connected(source, wire, hangs=False)
    _, error = syncer.sync(1)
    assert isinstance(error, EngineError)
    assert "NCCL error: unhandled system error" in str(error)
    assert source.num_fills == NUM_BUCKETS  # the other ranks gather with this one
    assert wire.destroyed.is_set()
    assert "finish_weight_update" not in engine.methods()

    _, again = syncer.sync(2)  # nothing is sent over what is broken, and no rank is left in a gather
    assert "ended by an earlier failure" in str(again)
    assert source.num_fills == 2 * NUM_BUCKETS
    assert engine.methods().count("start_weight_update") == 1

    fresh, other_engine, _ = connected(source, Wire("cpu"))
    _, error = fresh.sync(3)
    assert error is None
    assert different(source, other_engine) == []


def test_nccl_sync_after_engine_death_reports_death_not_broadcast(connected: Connect) -> None:
    source = MadeUpSource(NUM_BUCKETS, torch.float32)
    wire = Wire("cpu", fails_at=3)
    syncer, _, _ = connected(source, wire, dies_at=3)
    _, error = syncer.sync(1)
    assert "was killed by signal 9" in str(error)
    assert source.num_fills == NUM_BUCKETS


def test_nccl_sync_with_dead_engine_ends_before_wire_timeout(connected: Connect) -> None:
    source = MadeUpSource(4, torch.float32)
    syncer, _, reported = connected(source, Wire("cpu", holds=True), dies_at=0)
    began = time.monotonic()
    _, error = syncer.sync(1)
    assert "was killed by signal 9" in str(error)
    assert time.monotonic() - began < 20  # the broadcast was ended; WIRE_S is 30
    assert source.num_fills == 4
    assert reported == []


def test_nccl_sync_with_silent_engine_ends_at_deadline(connected: Connect) -> None:
    source = MadeUpSource(4, torch.float32)
    syncer, _, reported = connected(source, Wire("cpu", holds=True), timeout_s=1.0, hangs=True)
    _, error = syncer.sync(1)
    assert "has not taken bucket 1 of 4 within 3 s" in str(error)
    assert reported == []


def test_nccl_broadcast_stuck_after_abort_is_reported(connected: Connect) -> None:
    """NCCL may hold the main thread even after an abort; the failure watch then ends this rank."""
    source = MadeUpSource(4, torch.float32)

    class Deaf(Wire):
        def destroy(self) -> None:
            self.deaf_until = time.monotonic() + 60

    wire = Deaf("cpu", holds=True)
    syncer, _, reported = connected(source, wire, timeout_s=0.2, hangs=True)
    syncer.timeouts = Timeouts(sync_stuck_s=0.5)
    on_trouble = syncer.on_trouble

    def release(error: EngineError) -> None:
        on_trouble(error)
        wire.destroyed.set()

    syncer.on_trouble = release
    syncer.sync(1)
    assert [str(error) for error in reported] == ["bucket 1 is stuck on its way to the engines: 1 s"]
