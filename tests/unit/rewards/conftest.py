"""Trainers as for episodes, and batches without one."""

import asyncio
import functools
import threading
from collections.abc import Iterator

import pytest

from grpo.faults.watch import FailureWatch
from tests.support.reward_batches import PATIENCE_S, Batch, MakeBatch
from tests.support.speaking_trainers import make, model, script

__all__ = ["make", "model", "script"]


@pytest.fixture
def watch() -> FailureWatch:
    return FailureWatch(None, node=0, rank=0, host="a")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)
    loop.close()


@pytest.fixture
def batch_of(watch: FailureWatch, loop: asyncio.AbstractEventLoop) -> MakeBatch:
    return functools.partial(Batch, watch, loop)
