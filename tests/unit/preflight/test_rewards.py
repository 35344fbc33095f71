"""The trial of reward functions, beyond what `train.py` shows in `test_mistakes.py`: deadlines, loops, signatures."""

import asyncio
import functools
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from grpo import GRPOConfig
from grpo.preflight import rewards
from grpo.preflight.rewards import try_rewards

ROW = {"prompt": "1+1=", "answer": "2"}


def tried(func: Any, tmp_path: Path, row: dict[str, Any] = ROW, **settings: Any) -> asyncio.AbstractEventLoop | None:
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)
    return try_rewards(func, row, [1, 2, 3], args)


def test_try_rewards_passes_arguments_of_trl(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def score(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        kwargs["log_extra"]("column", ["a"] * 8)
        kwargs["log_metric"]("name", 1.0)
        return [0.0] * 8

    tried(score, tmp_path, num_generations=8)
    assert seen["prompts"] == ["1+1="] * 8
    assert seen["answer"] == ["2"] * 8
    assert len(seen["completions"]) == len(seen["completion_ids"]) == 8
    assert seen["trainer_state"].global_step == 0
    assert set(seen) == {
        "prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric"
    }  # fmt: skip


def test_try_rewards_with_remove_unused_columns_omits_columns(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it wants answer, and beside prompt the data set has the columns none"):
        tried(lambda completions, answer, **kwargs: [0.0] * 8, tmp_path, remove_unused_columns=True)


def test_try_rewards_with_nested_rewards_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"returned \[0\.0\] \(list\) among its rewards"):
        tried(lambda **kwargs: [[0.0]] * 8, tmp_path)


@pytest.mark.parametrize("is_async", [False, True])
def test_try_rewards_with_slow_function_warns(is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "DEADLINE_S", 0.2)
    before = signal.getsignal(signal.SIGUSR2)

    def slow(**kwargs: Any) -> list[float]:
        while True:
            try:
                threading.Event().wait()
            except Exception:  # noqa: BLE001  as a judge's client would
                continue

    async def slow_judge(**kwargs: Any) -> list[float]:
        await asyncio.sleep(3600)
        return []

    with pytest.warns(UserWarning, match=r"slow.* within 0 s .* 8 completions.*GRPO-206"):
        tried(slow_judge if is_async else slow, tmp_path)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_try_rewards_lets_function_set_alarms(tmp_path: Path) -> None:
    ended: list[str] = []

    def score(**kwargs: Any) -> list[float]:
        class OwnDeadlineError(Exception):
            pass

        def expire(*_: Any) -> None:
            raise OwnDeadlineError

        handler = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(60)
        except OwnDeadlineError:
            ended.append("its own alarm")
            return [0.0] * 8
        finally:
            signal.signal(signal.SIGALRM, handler)
        return []

    assert tried(score, tmp_path) is None
    assert ended == ["its own alarm"]


def test_try_rewards_with_async_functions_returns_shared_loop(tmp_path: Path) -> None:
    loops = []

    async def score(**kwargs: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * 8

    class Judge:
        async def __call__(self, **kwargs: Any) -> list[float]:
            loops.append(asyncio.get_running_loop())
            return [0.0] * 8

    loop = tried([score, Judge()], tmp_path)
    assert loop is not None
    assert loops == [loop, loop]
    assert loop.is_running()
    loop.call_soon_threadsafe(loop.stop)


def test_try_rewards_with_timeout_error_of_function_raises(tmp_path: Path) -> None:
    async def score(**kwargs: Any) -> list[float]:
        raise TimeoutError("the judge is away")

    with pytest.raises(ValueError, match=r"TimeoutError \[GRPO-205\]: the judge is away"):
        tried(score, tmp_path)


@pytest.mark.parametrize("is_async", [False, True])
def test_try_rewards_with_system_exit_raises(is_async: bool, tmp_path: Path) -> None:
    def leaves(**kwargs: Any) -> list[float]:
        raise SystemExit(0)

    async def leaves_too(**kwargs: Any) -> list[float]:
        raise SystemExit(0)

    with pytest.raises(ValueError, match=r"SystemExit \[GRPO-205\]: 0\n  in .*test_rewards.py:\d+, in leaves.*raise"):
        tried(leaves_too if is_async else leaves, tmp_path)


def test_try_rewards_skips_models_and_names_partials(tmp_path: Path) -> None:
    tried([nn.Linear(1, 1), "some/judge"], tmp_path)

    def score(scale: float) -> list[float]:
        return [scale]

    with pytest.raises(ValueError, match=r"reward function score \(.*test_rewards.py:\d+\) cannot be called"):
        tried(functools.partial(score, 2.0), tmp_path)


def test_try_rewards_calls_callable_without_signature(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward function dict returned 7 rewards for 8 completions"):
        tried(dict, tmp_path)


def test_try_rewards_with_chat_prompt_passes_messages(tmp_path: Path) -> None:
    seen: list[Any] = []

    def score(completions: Any, **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    tried(score, tmp_path, {"prompt": [{"role": "user", "content": "1+1?"}]})
    assert len(seen) == 8
    assert {message["role"] for (message,) in seen} == {"assistant"}
    assert all(isinstance(message["content"], str) for (message,) in seen)
