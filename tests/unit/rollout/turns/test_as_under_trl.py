"""Tools and environments that work under TRL: what they answer under its class, row by row, they answer under ours."""

import contextlib
import io
import itertools
import signal
import sqlite3
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from signal import alarm
from signal import signal as handle
from typing import Any
from unittest import mock

import pytest
import trl
from datasets import Dataset

from grpo import GRPOConfig, GRPOTrainer
from tests.support.engines import Script
from tests.support.speaking_engine import call, speaks, speaks_in_generate

ROWS = 8
TIMEOUT_S = 5.0  # many times what a call takes, on a busy machine too
HANGS = 13
CONFIG: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": ROWS,
    "num_generations": 2,
    "max_completion_length": 450,
    "max_steps": 2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "shuffle_dataset": False,
}
OURS = {"vllm_max_model_length": 500, "vllm_max_logprob_gap": 1e9, "tool_timeout": TIMEOUT_S}
PROBLEMS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{10 + row}*11"}]} for row in range(ROWS)])


# -- the users' code --------------------------------------------------------------------------------------------------


def interprets(a: int, b: int) -> str:
    """The usual code interpreter.

    Args:
        a: the one number
        b: the other
    """
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(f"time.sleep({a % 3} / 50); print('row', {a}); time.sleep(0.02); print({a} * {b})", {"time": time})
    return out.getvalue()


def captures(a: int, b: int) -> str:
    """Prints, and returns it.

    Args:
        a: the one number
        b: the other
    """
    before, sys.stdout = sys.stdout, io.StringIO()
    try:
        time.sleep(a % 3 / 50)
        print("row", a)
        time.sleep(0.02)
        return sys.stdout.getvalue()
    finally:
        sys.stdout = before


def bounds(a: int, b: int) -> str:
    """The product, soon.

    Args:
        a: the one number
        b: the other
    """

    def expire(*_: Any) -> None:
        raise TimeoutError

    try:
        before = signal.signal(signal.SIGALRM, expire)
        signal.alarm(20)
        answer = str(eval(f"{a} * {b}"))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    except Exception:  # noqa: BLE001  as users write it
        return "the program failed"
    return answer


def bounds_too(a: int, b: int) -> str:
    """The product, soon; by other names of the same functions.

    Args:
        a: the one number
        b: the other
    """
    try:
        before = handle(signal.SIGALRM, lambda *_: None)
        alarm(20)
        answer = str(eval(f"{a} * {b}"))
        alarm(0)
        handle(signal.SIGALRM, before)
    except Exception:  # noqa: BLE001  as users write it
        return "the program failed"
    return answer


class Notes:
    """Keeps a database from its `reset` on, as a browser's pages or a game's server would be kept."""

    def reset(self, **columns: Any) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table notes (a integer, b integer)")
        self.home, self.asked = threading.get_ident(), 0

    def notes(self, a: int, b: int) -> str:
        """Keep both.

        Args:
            a: the one number
            b: the other
        """
        self.database.execute("insert into notes values (?, ?)", (a, b))
        (count,) = self.database.execute("select count(*) from notes").fetchone()
        return f"{count} notes, {'at home' if self.home == threading.get_ident() else 'elsewhere'}"

    def get_reward(self) -> float:
        self.asked += 1
        if (self.asked, self.home) != (1, threading.get_ident()):
            return -100.0
        return float(self.database.execute("select count(*) from notes").fetchone()[0])


def users_code(hang: Callable[[], Any]) -> dict[str, Any]:
    count = itertools.count()

    def counts(a: int, b: int) -> str:
        """The number of this call among all rows'.

        Args:
            a: the one number
            b: the other
        """
        time.sleep(a % 3 / 100)
        return f"call {next(count)} of {a}"

    def hangs(a: int, b: int) -> str:
        """Hangs, for one.

        Args:
            a: the one number
            b: the other
        """
        with contextlib.redirect_stdout(io.StringIO()):
            if a == HANGS:
                hang()
        return "no"

    tools = [interprets, captures, bounds, bounds_too, counts, hangs]
    return {"tools": tools, "environment_factory": Notes}


CALLED = ["interprets", "counts", "captures", "notes", "bounds", "counts", "bounds_too"]


def reply(text: str, seed: int) -> str:
    """Rows call everything, each from another beginning and another number of times, and `hangs` last."""
    number, turn = int(text.partition("<u>")[2].partition("*")[0]), text.count("<t>")
    if turn > 4 + number % 3:
        return "done<e>"
    name = "hangs" if turn == 4 + number % 3 else CALLED[(number + turn) % len(CALLED)]
    return call(name, a=number, b=turn)


def reply_for_threads(text: str, seed: int) -> str:
    number, turn = int(text.partition("<u>")[2].partition("*")[0]), text.count("<t>")
    return "done<e>" if turn > 3 else call(["interprets", "notes", "captures", "notes"][turn], a=number, b=turn)


# -- both ways --


def trained(kind: Any, config: type, model: Path, folder: Path, users: dict[str, Any], **settings: Any) -> Any:
    """What each tool has answered to each row of each step, and the rewards of the steps."""
    answers: dict[str, list[list[str]]] = defaultdict(list)

    async def reward(completions: list[Any], **_: Any) -> list[float]:  # which is called once, whatever is compared
        for said in completions:
            for name in {*CALLED, "hangs"}:
                answers[name].append([message["content"] for message in said if message.get("name") == name])
        return [float(len(said)) for said in completions]

    args = config(output_dir=str(folder), **CONFIG, **settings)
    trainer = kind(model=str(model), reward_funcs=reward, args=args, train_dataset=PROBLEMS, **users)
    try:
        trainer.train()
    finally:
        if isinstance(trainer, GRPOTrainer):
            trainer.close()
    return dict(answers), [line["rewards/Notes/mean"] for line in trainer.state.log_history if "reward" in line]


def test_tool_and_environment_answers_match_trl(
    model: Path, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stdout, never = sys.stdout, threading.Event()

    def error() -> None:
        raise TimeoutError(f"tool hangs has not returned within {TIMEOUT_S:g} s (tool_timeout)")

    with mock.patch("transformers.GenerationMixin.generate", lambda self, **more: speaks_in_generate(reply)(**more)):
        expected = trained(trl.GRPOTrainer, trl.GRPOConfig, model, tmp_path / "trl", users_code(error), use_vllm=False)
    script.tokens_of = speaks(reply)
    found = trained(GRPOTrainer, GRPOConfig, model, tmp_path / "grpo", users_code(never.wait), **OURS)
    answers, rewards = expected
    for name in answers:
        assert len(answers[name]) == 2 * ROWS
        assert any(answers[name])
        assert found[0][name] == answers[name], name
    assert found[1] == rewards
    assert sys.stdout is stdout
    assert capsys.readouterr().out.count("[GRPO-613]: write them as async def") == 1  # not again in the second step


def test_max_tool_threads_gives_rows_own_streams_and_environment_threads(
    model: Path, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stdout, script.tokens_of = sys.stdout, speaks(reply_for_threads)
    answers, rewards = trained(
        GRPOTrainer, GRPOConfig, model, tmp_path / "grpo", users_code(print), max_tool_threads=8, **OURS
    )
    rows = [10 + number // 2 for number in range(2 * ROWS)]
    assert answers["interprets"] == [[f"row {a}\n0\n"] for a in rows]
    assert answers["captures"] == [[f"row {a}\n"] for a in rows]
    assert answers["notes"] == [["1 notes, at home", "2 notes, at home"]] * len(rows)
    assert rewards == [2.0, 2.0]
    assert sys.stdout is stdout
    assert "GRPO-613" not in capsys.readouterr().out
