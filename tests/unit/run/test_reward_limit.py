"""A reward function that hangs ends the job, and shows where it hangs; also where Python code cannot run."""

import asyncio
import functools
import subprocess
import sys
import time
from typing import Any

import pytest
from torch import nn
from trl.trainer.utils import is_async_callable

from grpo.job.failure import JobFailed
from grpo.job.watch import FailureWatch
from grpo.run.reward_limit import limited_rewards
from tests.launching import ROOT


@pytest.fixture
def watch() -> FailureWatch:
    return FailureWatch(None, node=0, rank=0, host="a")


class Scorer:
    def __call__(self, values: list[int], **_: Any) -> list[float]:
        return [float(value) for value in values]


def test_what_they_return_and_how_they_are_called_stays(watch: FailureWatch) -> None:
    phases = []

    def plain(values: list[int], factor: int = 1) -> list[float]:
        phases.append(watch.phase)
        return [float(value * factor) for value in values]

    async def awaited(values: list[int]) -> list[float]:
        phases.append(watch.phase)
        await asyncio.sleep(0)
        return [float(value) for value in values]

    model = nn.Linear(1, 1)
    funcs = limited_rewards([plain, functools.partial(plain, factor=2), Scorer(), model, awaited, awaited], watch, 60.0)
    assert [func([1, 2]) for func in funcs[:3]] == [[1.0, 2.0], [2.0, 4.0], [1.0, 2.0]]
    assert funcs[3] is model
    assert [is_async_callable(func) for func in funcs] == [False, False, False, False, True, True]

    async def both() -> Any:
        return await asyncio.gather(funcs[4]([1]), funcs[5]([2]))

    with watch.during("train"):
        assert asyncio.run(both()) == [[1.0], [2.0]]
        assert asyncio.run(both()) == [[1.0], [2.0]]
        assert watch.phase == "train"
    assert phases == ["reward"] * 6


def waits_for_a_service(values: list[int]) -> list[float]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)
    return []


def test_one_that_hangs_is_the_failure(watch: FailureWatch) -> None:
    (func,) = limited_rewards([waits_for_a_service], watch, 0.3)
    what = "phase 'reward': reward function waits_for_a_service has not"
    with pytest.raises(JobFailed, match=what) as failed, watch.guard():
        func([1])
    assert "returned within 0.3 s (reward_timeout); it was here, the innermost call first:\n" in str(failed.value)
    assert "in waits_for_a_service\n" in str(failed.value)


def test_one_that_is_awaited_is_the_failure(watch: FailureWatch) -> None:
    async def judge(values: list[int]) -> list[float]:
        for _ in range(6000):
            await asyncio.sleep(0.01)
        return []

    (func,) = limited_rewards([judge], watch, 0.3)
    with pytest.raises(JobFailed, match="reward function judge has not returned"), watch.guard():
        asyncio.run(func([1]))


HELD = """
import ctypes
from grpo.job import watch as watches
from grpo.run.reward_limit import limited_rewards

watches.ALONE_GRACE_S = 0.5
watch = watches.FailureWatch(None, node=0, rank=0, host="a")

def holds_the_lock(values):
    ctypes.PyDLL(None).sleep(120)

(func,) = limited_rewards([holds_the_lock], watch, 0.5)
with watch.guard():
    func([1])
"""


def test_a_lone_process_whose_lock_is_held_ends_with_its_stacks() -> None:
    ended = subprocess.run([sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "in holds_the_lock" in ended.stderr
