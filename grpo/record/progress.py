"""Progress of training on rank 0's screen: a bar on a terminal, elsewhere one line per log step.

Replaces transformers' callbacks, which print all metrics at every log step; those are in metrics.jsonl.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn
from rich.table import Column
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from grpo.place.launch import read_launch
from grpo.place.log import FILE_ONLY
from grpo.record.screen import print_above, show_log

PACE_S = 3600.0  # window of the mean step time: covers several generation batches, with and without a save
_log = logging.getLogger(__name__)
_EVALUATION = re.compile(r"(eval_(?:(.+)_)?)reward")  # the set's name is in it if there are several
_GONE = (OSError, ValueError)  # raised by a terminal that is gone: training goes on


class ProgressOnScreen(TrainerCallback):
    """Shows steps, reward, tokens/s, waiting share, slowest node and the time left, on global rank 0.

    Draws a bar if the console is a terminal and `disable_tqdm` is off. The trainer calls `close` at the end, because
    transformers calls no callback after an error.

    The bar is drawn by the calls that change it, never by a thread of its own: data loaders fork, and would inherit its
    lock. Standard error does not pass through it: the thread that ends a rank writes there, and must not wait for a
    lock.

    Args:
        console: to draw on; default: standard output.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._num_nodes = read_launch(os.environ).num_nodes
        self._bar: Progress | None = None
        """Bar from the start of training until `close`, on rank 0. Not started if lines are shown instead."""
        self._has_lines = False
        self._evaluation: TaskID | None = None
        self._figures: list[str] = []
        show_log()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.close()
        if not state.is_world_process_zero:
            return
        console = self._console or _Console()
        self._has_lines = args.disable_tqdm or not console.is_interactive
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(ratio=1)),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=False,
            expand=True,
            get_time=self._clock,
            speed_estimate_period=PACE_S,
        )
        self._bar.add_task("step", completed=state.global_step, total=state.max_steps, figures="")
        self._show(self._bar)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=state.global_step)
            self._draw(self._bar)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if not logs or not state.is_world_process_zero:
            return
        step = f"step {state.global_step}" + (f"/{state.max_steps}" if state.max_steps else "")
        if evaluated := next(filter(None, map(_EVALUATION.fullmatch, logs)), None):
            title = f"evaluation of {evaluated[2]}:" if evaluated[2] else "evaluation:"
            _log.info("%s", "  ".join([step, title, *figures(logs, self._num_nodes, prefix=evaluated[1])]))
        elif self._bar is not None and (shown := figures(logs, self._num_nodes)):
            line = "  ".join([step, *shown, *time_figures(self._bar.tasks[0])])
            _log.info("%s", line, extra=None if self._has_lines else FILE_ONLY)
            self._figures = shown
            self._draw(self._bar)

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        eval_dataloader: Any = kwargs.get("eval_dataloader")
        if self._bar is None or not has_length(eval_dataloader):
            return
        if self._evaluation is None:
            self._evaluation = self._bar.add_task("evaluation", total=len(eval_dataloader), figures="")
        self._bar.advance(self._evaluation)
        self._draw(self._bar)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self._bar is not None and self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
            self._evaluation = None
            self._draw(self._bar)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar. Safe to call twice."""
        if self._bar is not None:
            self._hide(self._bar)
            self._bar = self._evaluation = None
            self._figures = []

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar in a `with` block, for code that writes directly to the terminal."""
        if self._bar is not None:
            self._hide(self._bar)
        try:
            yield
        finally:
            if self._bar is not None:
                self._show(self._bar)

    def _show(self, bar: Progress) -> None:
        if not self._has_lines:
            with contextlib.suppress(*_GONE):
                bar.start()
                self._draw(bar)
                print_above(bar.console)

    def _hide(self, bar: Progress) -> None:
        print_above(None)
        if bar.live.is_started:
            with contextlib.suppress(*_GONE):
                bar.stop()

    def _draw(self, bar: Progress) -> None:
        bar.update(bar.task_ids[0], figures="  ".join([*self._figures, *time_figures(bar.tasks[0])]))
        if bar.live.is_started:
            with contextlib.suppress(*_GONE):
                bar.refresh()


def time_figures(steps: Task) -> list[str]:
    """Format the step time and the time left; [] before the second step. Excludes the first step, a warm-up."""
    if not steps.speed:
        return []
    left_s = steps.remaining / steps.speed if steps.remaining else 0.0
    return [f"{duration(1 / steps.speed)} a step", *([f"left {duration(left_s)}"] if left_s > 0 else [])]


def figures(logs: Mapping[str, Any], num_nodes: int, *, prefix: str = "") -> list[str]:
    """Format the main figures of a training log, or with the prefix of an evaluation's names; [] for other logs.

    Args:
        logs: as in `metrics.jsonl`; missing and None values are left out.
    """

    def figure(name: str) -> float | None:
        value = logs.get(prefix + name)
        return value if isinstance(value, int | float) else None

    shown = [] if (reward := figure("reward")) is None else [f"reward {reward:.3f}"]
    rate, share, slowest = (figure(f"rollout/{name}") for name in ("tokens_per_s", "wait_share", "slowest_node"))
    if rate is not None:
        shown.append(f"{rate:.0f} tokens/s" + (" a node" if num_nodes > 1 else ""))
    if share is not None:
        shown.append(f"waiting {100 * share:.0f} %")
    if num_nodes > 1 and slowest is not None and float(slowest).is_integer():  # a mean over nodes has no meaning
        generate = "rollout/generate_s"
        mean_s, most_s = figure(generate), figure(f"{generate}_max")
        behind = f" ({most_s / mean_s:.1f}x the mean time)" if mean_s and most_s else ""
        shown.append(f"slowest node {slowest:.0f}{behind}")
    return shown


def duration(seconds: float) -> str:
    """Format seconds for reading: "0.4 s", "12 s", "22 min", "3 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Never hide the cursor: a killed rank could not restore it."""
        return False

    def on_broken_pipe(self) -> None:
        """Mute the console only: rich would end the process."""
        self.quiet = True
