"""How training goes on, on rank 0's screen: a bar on a terminal, elsewhere one line at every log.

It takes the place of transformers' callbacks, which print all metrics at every log; they are in metrics.jsonl.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from grpo.place.launch import read_launch
from grpo.record.screen import say, speak_above

PACE_STEPS = 20  # a step's time is the mean over so many: several generation batches, with a save or not
_GONE = (OSError, ValueError)  # of a terminal that is no more: training goes on without it


class ProgressOnScreen(TrainerCallback):
    """Shows steps, reward, tokens/s, waiting share, slowest node and the time left, on global rank 0.

    A bar where the console is a terminal and `disable_tqdm` is off. Whoever trains calls `close` at the end: after an
    error transformers tells nobody.

    Args:
        console: to draw on; standard output if it is not given.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: _Bar | None = None
        self._pace = Pace()
        self._num_nodes = 1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        if not state.is_world_process_zero:
            return
        self._num_nodes = read_launch(os.environ).num_nodes
        self._pace = Pace()
        console = self._console or _Console()
        if console.is_interactive and not args.disable_tqdm:
            self._bar = _Bar(console, step=state.global_step, max_steps=state.max_steps)
            self._bar.show()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._pace.step_ended(state.global_step, self._clock())
            if self._bar is not None:
                self._bar.advance(state.global_step, self._time_figures(state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        step = f"step {state.global_step}/{state.max_steps}"
        if evaluated := figures(logs, self._num_nodes, prefix="eval_"):
            say("  ".join([step, "evaluation:", *evaluated]))
        elif shown := figures(logs, self._num_nodes):
            if self._bar is not None:
                self._bar.figures(shown)
            else:
                say("  ".join([step, *shown, *self._time_figures(state)]))

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._bar is not None and has_length(eval_dataloader):
            self._bar.evaluate(len(eval_dataloader))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.end_evaluation()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away. Safe to call twice."""
        if self._bar is not None:
            self._bar.hide()
            self._bar = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Without a bar, for those who write to the terminal past it."""
        if self._bar is None:
            yield
            return
        self._bar.hide()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.show()

    def _time_figures(self, state: TrainerState) -> list[str]:
        if (step_s := self._pace.step_s) is None:
            return []
        left_s = (state.max_steps - state.global_step) * step_s
        return [f"{duration(step_s)} a step", *([f"left {duration(left_s)}"] if left_s > 0 else [])]


class Pace:
    """How long a step takes, of the last `PACE_STEPS`. The first of an attempt counts never: engines warm up in it."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)

    def step_ended(self, step: int, now: float) -> None:
        self._ends.append((step, now))

    @property
    def step_s(self) -> float | None:
        """None before the second step."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (ended - began) / (last - first)


def figures(logs: Mapping[str, Any], num_nodes: int, *, prefix: str = "") -> list[str]:
    """What one looks at, of what was logged for training, or with `eval_` for an evaluation; empty where it is neither.

    Args:
        logs: as `metrics.jsonl` has them; what is missing or None is left out.
    """

    def figure(name: str) -> float | None:
        value = logs.get(prefix + name)
        return value if isinstance(value, int | float) else None

    shown = []
    if (reward := figure("reward")) is not None:
        shown.append(f"reward {reward:.3f}")
    rate, share, slowest = (figure(f"rollout/{name}") for name in ("tokens_per_s", "wait_share", "slowest_node"))
    if rate is not None:
        shown.append(f"{rate:.0f} tokens/s" + (" a node" if num_nodes > 1 else ""))
    if share is not None:
        shown.append(f"waiting {100 * share:.0f} %")
    if num_nodes > 1 and slowest is not None and float(slowest).is_integer():  # a mean over nodes says nothing
        generate = "rollout/generate_s"
        mean_s, most_s = figure(generate), figure(f"{generate}_max")
        behind = f" ({most_s / mean_s:.1f}x the mean time)" if mean_s and most_s else ""
        shown.append(f"slowest node {slowest:.0f}{behind}")
    return shown


def duration(seconds: float) -> str:
    """For a person: "0.4 s", "12 s", "22 min", "3 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """A rank that is killed could not bring a hidden cursor back."""
        return False

    def on_broken_pipe(self) -> None:
        """rich would end the process."""
        self.quiet = True


class _Bar:
    """Drawn by those who change it, never by a thread of its own: data loaders fork, and would inherit its lock.

    Standard error is not led past it: the thread that ends a rank speaks there, and must wait for no lock.
    """

    def __init__(self, console: Console, *, step: int, max_steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(ratio=1)),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=False,
            expand=True,
        )
        self._steps = self._progress.add_task("step", completed=step, total=max_steps, figures="")
        self._evaluation: TaskID | None = None
        self._figures: list[str] = []
        self._time_figures: list[str] = []

    def show(self) -> None:
        with contextlib.suppress(*_GONE):
            self._progress.start()
            self._progress.refresh()
            speak_above(self._console)

    def hide(self) -> None:
        speak_above(None)
        with contextlib.suppress(*_GONE):
            self._progress.stop()

    def advance(self, step: int, time_figures: list[str]) -> None:
        self._time_figures = time_figures
        self._draw(completed=step)

    def figures(self, shown: list[str]) -> None:
        self._figures = shown
        self._draw()

    def evaluate(self, num_batches: int) -> None:
        if self._evaluation is None:
            self._evaluation = self._progress.add_task("evaluation", total=num_batches, figures="")
        self._progress.advance(self._evaluation)
        self._draw()

    def end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._progress.remove_task(self._evaluation)
            self._evaluation = None
            self._draw()

    def _draw(self, **changes: Any) -> None:
        self._progress.update(self._steps, figures="  ".join([*self._figures, *self._time_figures]), **changes)
        if self._progress.live.is_started:
            with contextlib.suppress(*_GONE):
                self._progress.refresh()
