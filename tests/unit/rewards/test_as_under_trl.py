"""Reward functions that TRL calls in the main thread give the same rewards under this trainer, row by row."""

import contextlib
import io
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import alarm as set_alarm
from signal import signal as set_handler
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from grpo.faults import users_code
from tests.support.speaking_engine import Make, steps_of

PATIENCE_S = 60.0
PROGRAMS = ["1+1", "1+2", "4-2", "7"]
RIGHT = [1.0, 0.0, 1.0, 0.0]


def rows() -> Dataset:
    prompts = [[{"role": "user", "content": f"{10 + row}*{10 + row}"}] for row in range(len(PROGRAMS))]
    return Dataset.from_dict({"prompt": prompts, "program": PROGRAMS})


def raises(number: int, frame: Any) -> None:
    raise TimeoutError


def score(judge: Callable[[str], Any], programs: list[str]) -> list[float]:
    """As most judges do: a program that fails is wrong, whyever it fails."""
    rewards = []
    for program in programs:
        try:
            rewards.append(float(judge(program) == 2))
        except Exception:  # noqa: BLE001
            rewards.append(0.0)
    return rewards


def sets_an_alarm(program: list[str], **_: Any) -> list[float]:
    def judge(source: str) -> Any:
        signal.signal(signal.SIGALRM, raises)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        try:
            return eval(source)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return score(judge, program)


def sets_one_under_another_name(program: list[str], **_: Any) -> list[float]:
    def judge(source: str) -> Any:
        set_handler(signal.SIGALRM, raises)
        set_alarm(60)
        try:
            return eval(source)
        finally:
            set_alarm(0)

    return score(judge, program)


_connection = sqlite3.connect(":memory:")


def asks_a_database(program: list[str], **_: Any) -> list[float]:
    return score(lambda source: _connection.execute(f"SELECT {source}").fetchone()[0], program)


_of_this_thread = threading.local()
_of_this_thread.names = {}


def has_what_its_thread_has(program: list[str], **_: Any) -> list[float]:
    return score(lambda source: eval(source, _of_this_thread.names), program)


_inside, _printed = threading.Event(), threading.Event()


def collects_what_is_printed(program: list[str], **_: Any) -> list[float]:
    def judge(source: str) -> int:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(f"print({source})")
            _inside.set()
            assert _printed.wait(PATIENCE_S)
        return int(out.getvalue())

    return score(judge, program)


def leaves_another_stream(program: list[str], **_: Any) -> list[float]:
    def judge(source: str) -> int:
        sys.stdout = out = io.StringIO()
        exec(f"print({source})")
        return int(out.getvalue())

    return score(judge, program)


PRINTING = (collects_what_is_printed, leaves_another_stream)
OF_THE_MAIN_THREAD = (sets_an_alarm, sets_one_under_another_name, asks_a_database, has_what_its_thread_has)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Events are as at the beginning, and so are the streams and the handler of the alarm afterwards."""
    _inside.clear()
    _printed.clear()
    users_code._warned.clear()
    streams, handler = (sys.stdout, sys.stderr), signal.getsignal(signal.SIGALRM)
    yield
    after = (sys.stdout, sys.stderr)
    signal.signal(signal.SIGALRM, handler)
    assert after == streams


def note_rewards(trainer: Any) -> list[list[float]]:
    """What is right in each row, and what TRL makes of each function's answers, of the next batch."""
    noted: list[list[float]] = []
    calculate = trainer._calculate_rewards

    def calculates(inputs: Any, *rest: Any) -> torch.Tensor:
        rewards = calculate(inputs, *rest)
        right = dict(zip(PROGRAMS, RIGHT, strict=True))
        noted.append([right[row["program"]] for row in inputs])
        noted.extend(rewards.T.tolist())
        return rewards

    trainer._calculate_rewards = calculates
    return noted


def rewards_under_trl(model: Path, folder: Path) -> list[list[float]]:
    args = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        report_to="none",
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    functions = [*OF_THE_MAIN_THREAD, *PRINTING]
    trainer = trl.GRPOTrainer(model=str(model), reward_funcs=functions, args=args, train_dataset=rows())
    noted = note_rewards(trainer)
    _printed.set()  # there, nothing else runs meanwhile
    streams = sys.stdout, sys.stderr
    trainer.train()
    sys.stdout, sys.stderr = streams  # TRL leaves them as they are
    return noted


@pytest.fixture(scope="module")
def trls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    return rewards_under_trl(model, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("function", OF_THE_MAIN_THREAD, ids=lambda function: function.__name__)
def test_rewards_of_main_thread_functions_match_trl(
    make: Make, trls: list[list[float]], function: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside two that print. One for each trainer, as what is behind it runs in the main thread too."""
    right = trls[0]
    assert trls == [right] * 7
    _printed.set()  # for the trial before training
    config = {"max_steps": 1, "check_rewards": True, "max_completion_length": 4}
    trainer = make(lambda text, seed: "17<e>", [*PRINTING, function], train_dataset=rows(), config=config)
    _inside.clear()
    _printed.clear()
    compute = trainer._get_per_token_logps_and_entropies

    def computes(*args: Any, **kwargs: Any) -> Any:
        """The main thread, which prints in the midst of a call."""
        assert _inside.wait(PATIENCE_S)
        print("a line of the main thread's")
        _printed.set()
        return compute(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = computes  # type: ignore[method-assign]
    ours, before = note_rewards(trainer), sys.stdout
    steps_of(trainer)
    assert sys.stdout is before
    assert ours == [right] * 4
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[grpo] ")]
    (moved,) = [line for line in said if "main thread" in line]
    assert function.__name__ in moved
    assert ("[GRPO-210]" in moved) == (function in (asks_a_database, has_what_its_thread_has))
    (left,) = [line for line in said if "in place" in line]
    assert left.startswith("[grpo] reward function leaves_another_stream has left another sys.stdout in place")


def test_reward_moved_on_other_rank_moves_to_main_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads: list[bool] = []

    def works_here(program: list[str], **_: Any) -> list[float]:
        threads.append(threading.current_thread() is threading.main_thread())
        return score(eval, program)

    config = {"check_rewards": True, "max_completion_length": 4}
    trainer = make(lambda text, seed: "17<e>", works_here, train_dataset=rows(), config=config)
    gather = trainer.accelerator.gather

    def gathers(tensor: torch.Tensor) -> torch.Tensor:
        is_of_functions = tensor.dtype == torch.bool and len(tensor) == 1
        return torch.cat([tensor, torch.tensor([True])]) if is_of_functions else gather(tensor)

    monkeypatch.setattr(trainer.accelerator, "gather", gathers)
    threads.clear()
    steps_of(trainer)
    assert threads == [False, False, True, True, True, True]  # a batch and a group, a group twice, then two batches
    (moved,) = [line for line in capsys.readouterr().out.splitlines() if "GRPO-210" in line]
    assert "works_here needs the main thread, or gives other rewards beside it, as rank 1 has found" in moved
