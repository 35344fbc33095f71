"""The shared-memory transport from end to end: two workers' own code, and an engine that dies between two buckets."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo.engine.client import EngineError
from grpo.weights.shm import ShmTransport
from grpo.weights.sync import WeightSyncer
from grpo.weights.worker import BucketsInfo, CountedShmEngine, ShmInitInfo
from tests.support.engines import Script, ScriptedEngine, agree
from tests.support.nccl_stand_in import MadeUpSource


class SlowToDie:
    """Two engines of one worker each, behind scripted clients; the second one dies between two buckets of the weight
    sync."""

    def __init__(self, dies_at: int | None) -> None:
        self.engines = [ScriptedEngine(f"engine {number}", Script(control=self.controls(number))) for number in (0, 1)]
        self.loaded: list[list[str]] = [[], []]
        self.gave_up = threading.Event()
        self._dies_at = dies_at

    def controls(self, number: int) -> Any:
        worker = object.__new__(CountedShmEngine)  # its constructor wants an engine
        worker.device = torch.device("cpu")
        worker.parallel_config = SimpleNamespace(rank=0)  # type: ignore[assignment]
        worker.note_received = lambda *args, **kwargs: None  # type: ignore[method-assign]

        def load(weights: list[tuple[str, torch.Tensor]]) -> None:
            if number == 1 and len(self.loaded[1]) == self._dies_at:
                raise EngineError("was killed by signal 9")
            self.loaded[number].append(weights[0][0])

        worker.load = load  # type: ignore[method-assign]

        def control(method: str, kwargs: dict[str, Any]) -> Any:
            if method == "init_weight_transfer_engine":
                worker.init_transfer_engine(ShmInitInfo(**kwargs["init_info"]))
            if method == "update_weights":
                try:
                    worker.receive_weights(BucketsInfo(**kwargs["update_info"]))
                except ConnectionError as error:
                    self.gave_up.set()
                    raise EngineError(str(error)) from error
            return agree(method, kwargs)

        return control


@pytest.mark.parametrize("dies_at", [None, 5])
def test_shm_transport_after_engine_death_ends_sync(dies_at: int | None) -> None:
    """The other one hears of it at once, and the other ranks gather to the end."""
    source = MadeUpSource(12, torch.bfloat16)
    node = SlowToDie(dies_at)
    syncer = WeightSyncer(source, node.engines, backend="shm", tensor_parallel_size=1, timeout_s=60.0)  # type: ignore[arg-type]
    syncer.connect()
    begun = time.monotonic()
    _, error = syncer.sync(1)
    assert time.monotonic() - begun < 30
    assert source.num_fills == 12
    heads = [f"bucket{number}.0" for number in range(12)]
    if dies_at is None:
        assert error is None
        _, error = syncer.sync(2)
        assert error is None
        assert node.loaded == [heads * 2, heads * 2]
    else:
        assert str(error) == "was killed by signal 9"
        assert node.gave_up.wait(20)
        assert node.loaded[1] == heads[:dies_at]
        assert len(node.loaded[0]) < 12
        _, error = syncer.sync(2)
        assert "ended by an earlier failure" in str(error)
    syncer.close()


def test_shm_buffer_is_free_only_after_all_workers_read_it() -> None:
    """What they have said of the last weight sync counts for nothing: not all of it is read when they have answered."""
    transport = ShmTransport(buffer_bytes=64, num_workers=2)
    try:
        transport._taken[0].write(bytes([0, 1]))
        assert transport.is_taken(0, 0.0)
        transport._taken[0].write(bytes([0, 1, 1, 0]))
        transport.begin()
        assert not transport.is_taken(0, 0.0)
        transport._taken[0].write(bytes([1, 1]))
        assert not transport.is_taken(0, 0.0)
        transport._taken[0].write(bytes([0]))
        assert transport.is_taken(0, 0.0)
        assert not transport.is_taken(1, 0.0)
    finally:
        transport.close()
