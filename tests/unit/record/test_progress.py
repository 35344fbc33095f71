"""What training shows of itself: a bar on a terminal, lines elsewhere."""

import errno
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from grpo.record.progress import PACE_S, ProgressOnScreen, duration, figures
from grpo.record.screen import say
from grpo.weights import delivery
from tests.support.scripted_trainer import make_trainer, train, use_scripted_engines

LOGS = {
    "loss": 0.1,
    "reward": 0.52,
    "rollout/tokens_per_s": 2136.4,
    "rollout/wait_share": 0.123,
    "rollout/generate_s": 10.0,
    "rollout/generate_s_max": 16.0,
    "rollout/slowest_node": 1.0,
    "epoch": 1.0,
}
CONTROL: Any = None


def state(step: int, *, main: bool = True) -> Any:
    return SimpleNamespace(global_step=step, max_steps=150, is_world_process_zero=main)


class Screen:
    """A console of that kind, and a clock that a test sets."""

    def __init__(self, *, terminal: bool, width: int = 120) -> None:
        self.file, self.now = io.StringIO(), 0.0
        console = Console(file=self.file, force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
        self.progress = ProgressOnScreen(console, clock=lambda: self.now)

    def begin(self, step: int = 0, *, disable_tqdm: bool = False, main: bool = True) -> None:
        args: Any = SimpleNamespace(disable_tqdm=disable_tqdm)
        self.args = args
        self.progress.on_train_begin(args, state(step, main=main), CONTROL)

    def step(self, step: int, logs: dict[str, Any] | None = None, *, main: bool = True) -> None:
        self.progress.on_step_end(self.args, state(step, main=main), CONTROL)
        if logs is not None:
            self.progress.on_log(self.args, state(step, main=main), CONTROL, logs=logs)

    def drawn(self) -> str:
        """What was written since the last look, without control codes."""
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")


@pytest.fixture
def bar() -> Iterator[Screen]:
    """A test begins it itself: pytest puts its own standard output in place after the fixtures."""
    screen = Screen(terminal=True)
    yield screen
    screen.progress.close()


@pytest.mark.usefixtures("two_nodes")
def test_progress_without_terminal_prints_line_per_log(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(terminal=False)
    screen.begin()
    screen.step(1, {**LOGS, "reward": None})
    screen.now = 12.0
    screen.step(2, LOGS)
    screen.progress.on_log(screen.args, state(2), CONTROL, logs={"train_runtime": 3.0})
    screen.progress.on_log(screen.args, state(2), CONTROL, logs={"eval_reward": 0.25, "eval_loss": 1.0})
    screen.progress.on_train_end(screen.args, state(2), CONTROL)
    work = "2136 tokens/s a node  waiting 12 %  slowest node 1 (1.6x the mean time)"
    assert capsys.readouterr().out.splitlines() == [
        f"[grpo] step 1/150  {work}",
        f"[grpo] step 2/150  reward 0.520  {work}  12 s a step  left 30 min",
        "[grpo] step 2/150  evaluation:  reward 0.250",
    ]
    assert screen.drawn() == ""


def test_progress_on_terminal_shows_bar_below_output(bar: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    bar.begin()
    assert "step" in (begun := bar.drawn())
    assert "0/150" in begun
    bar.step(1)
    bar.now = 12.0
    bar.step(2, LOGS)
    shown = bar.drawn().splitlines()[-1].split("\r")[-1]
    assert " 2/150 reward 0.520  2136 tokens/s  waiting 12 %  12 s a step  left 30 min" in shown
    assert "slowest" not in shown, "there is one node"
    say("a very long line " + 20 * "with [words] ")
    print("a reward function prints")
    lines = [line.strip() for line in bar.drawn().splitlines()]
    assert "[grpo] a very long line " + (20 * "with [words] ").strip() in lines
    assert "a reward function prints" in lines
    assert "2/150" in lines[-1], "the bar is below"
    bar.progress.close()
    say("after it")
    assert capsys.readouterr().out == "[grpo] after it\n"
    assert "\x1b[?25l" not in bar.file.getvalue(), "a killed rank could not bring a hidden cursor back"


def test_progress_on_narrow_terminal_wraps_figures() -> None:
    screen = Screen(terminal=True, width=60)
    screen.begin()
    screen.step(2, LOGS)
    screen.progress.close()
    assert "waiting 12 %" in " ".join(screen.drawn().split())


def test_progress_during_evaluation_shows_own_bar(bar: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    bar.begin()
    for _ in range(2):
        bar.progress.on_prediction_step(bar.args, state(0), CONTROL, eval_dataloader=[1, 2, 3])
    drawn = bar.drawn()
    assert "evaluation" in drawn
    assert "2/3" in drawn
    bar.progress.on_log(bar.args, state(0), CONTROL, logs={"eval_reward": 0.25})
    assert "step 0/150  evaluation:  reward 0.250" in bar.drawn()
    bar.progress.on_evaluate(bar.args, state(0), CONTROL)
    assert "evaluation" not in bar.drawn()
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("two_nodes")
def test_progress_prints_line_per_evaluation_set(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(terminal=True)
    before, of_hard = {"eval_reward": 0.25, "eval_rewards/a_reward/mean": 0.5}, {"eval_hard_reward": 0.125}
    untrained = SimpleNamespace(global_step=0, max_steps=0, is_world_process_zero=True)
    screen.progress.on_log(None, untrained, CONTROL, logs=before)  # type: ignore[arg-type]
    screen.begin()
    screen.progress.on_log(screen.args, state(2), CONTROL, logs=of_hard | {"eval_hard_rollout/tokens_per_s": 21.0})
    screen.progress.on_train_end(screen.args, state(2), CONTROL)
    screen.progress.on_log(screen.args, state(150), CONTROL, logs=of_hard)
    screen.progress.on_log(screen.args, state(150, main=False), CONTROL, logs=of_hard)
    assert capsys.readouterr().out.splitlines() == [
        "[grpo] step 0  evaluation:  reward 0.250",
        "[grpo] step 150/150  evaluation of hard:  reward 0.125",
    ]
    assert "step 2/150  evaluation of hard:  reward 0.125  21 tokens/s a node" in screen.drawn()


def test_progress_aside_hides_bar(bar: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    bar.begin()
    with bar.progress.aside():
        bar.drawn()
        bar.step(1, LOGS)
        say("to the terminal itself")
        assert bar.drawn() == ""
    assert capsys.readouterr().out == "[grpo] to the terminal itself\n"
    assert "1/150 reward 0.520" in bar.drawn()


@pytest.mark.parametrize(("disable_tqdm", "main", "lines"), [(True, True, 1), (False, False, 0)])
def test_progress_with_disable_tqdm_or_on_other_rank_draws_no_bar(
    disable_tqdm: bool, main: bool, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(terminal=True)
    screen.begin(disable_tqdm=disable_tqdm, main=main)
    screen.step(1, LOGS, main=main)
    assert screen.drawn() == ""
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_progress_on_broken_terminal_raises_nothing(bar: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    bar.begin()
    monkeypatch.setattr(bar.file, "write", gone)
    bar.step(1, LOGS)
    say("nobody hears it")
    with bar.progress.aside():
        pass
    bar.progress.close()
    assert not hasattr(sys.stdout, "rich_proxied_file"), "standard output is as it was"


def test_progress_pace_follows_recent_steps_without_first(bar: Screen) -> None:
    bar.begin(step=4)
    bar.now = 100.0  # the first step takes 100 s
    bar.step(5)
    assert "a step" not in bar.drawn()
    bar.now = 102.0
    bar.step(6)
    assert "2.0 s a step" in bar.drawn()
    for step in range(7, 20):
        bar.now += PACE_S / 4
        bar.step(step)
    assert "15 min a step" in bar.drawn()


def test_figures_omit_missing_values() -> None:
    assert figures({}, 1) == figures({"train_runtime": 1.0}, 1) == []
    assert figures({"reward": float("nan"), "rollout/slowest_node": 0.5}, 2) == ["reward nan"]
    assert figures({"rollout/slowest_node": 0.0}, 2) == ["slowest node 0"]
    assert figures({"rollout/slowest_node": 0.0}, 1) == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.42, "0.4 s"), (9.97, "10 s"), (99, "99 s"), (100, "2 min"), (5930, "99 min"), (11100, "3 h 05 min")],
)
def test_duration_formats_seconds(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    use_scripted_engines(monkeypatch)
    monkeypatch.setattr(delivery, "is_due", lambda sync: False)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_trainer_output_has_one_progress_line_per_step(
    tiny_model: Path, tmp_path: Path, disable_tqdm: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = train(tiny_model, tmp_path, [], disable_tqdm=disable_tqdm, max_steps=2)
    kinds = [type(each) for each in trainer.callback_handler.callbacks]
    assert kinds.count(ProgressOnScreen) == 1
    assert not {PrinterCallback, ProgressCallback} & set(kinds)
    said = capsys.readouterr()
    lines = [line for line in said.out.splitlines() if line.startswith("[grpo] step ")]
    assert [line.split("  ")[0] for line in lines] == ["[grpo] step 1/2", "[grpo] step 2/2"]
    assert all("  reward " in line for line in lines)
    assert "grad_norm" not in said.out + said.err


@pytest.mark.usefixtures("engines")
def test_progress_after_training_failure_removes_bar(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(terminal=True)
    trainer = make_trainer(tiny_model, tmp_path, [], disable_tqdm=False)
    trainer._parts.screen._console = screen.progress._console
    trainer._calculate_rewards = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.close()
    assert "0/3" in screen.drawn()
    assert trainer._parts.screen._bar is None
    say("on the screen itself")
    assert "[grpo] on the screen itself" in capsys.readouterr().out
