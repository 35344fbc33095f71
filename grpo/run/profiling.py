"""`profile_steps`: torch's profiler over some optimizer steps, and what share of them was communication.

Over NCCL and gloo alike: what counts as communication is told by names, as torch gives them (`nccl...` kernels,
`gloo:...` and `c10d::...` operators).
"""

from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.run.screen import say

PROFILE_FOLDER = "profile"
_COMMUNICATION = ("nccl", "gloo:", "c10d::")

Interval = tuple[float, float]


class ProfileSteps(TrainerCallback):
    """Profiles `steps`, counted from 1, on this rank; writes a Chrome trace and tells the shares of the time.

    Args:
        metrics: is given `profile/computation_share`, `profile/communication_share` and `profile/nothing_share` at the
            end of the last of the steps; TRL logs rank 0's, and every rank says them.
    """

    def __init__(self, steps: range, rank: int, metrics: MutableMapping[str, list[float]]) -> None:
        self._steps, self._rank, self._metrics = steps, rank, metrics
        self._profiler: Any = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Steps before the first one may have been done by an earlier attempt.
        if self._profiler is None and self._steps and state.global_step + 1 in self._steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._profiler is not None and state.global_step >= self._steps[-1]:
            self._finish(Path(args.output_dir))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._profiler is not None:
            self._finish(Path(args.output_dir))

    def _finish(self, output_dir: Path) -> None:
        profiler, self._profiler, steps = self._profiler, None, self._steps
        self._steps = range(0)  # once an attempt
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # these steps are slower anyway
        profiler.stop()
        folder = output_dir / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self._rank}-steps{steps[0]}-{steps[-1]}.json.gz"
        profiler.export_chrome_trace(str(path))
        found = shares(profiler.events())
        self._metrics.update({name: [share] for name, share in found.items()})
        told = ", ".join(f"{name[8:-6]} {share:.0%}" for name, share in found.items())
        say(f"profile of rank {self._rank}, steps {steps[0]} to {steps[-1]}: {told or 'nothing'}; {path}")


def shares(events: Iterable[Any]) -> dict[str, float]:
    """Of the time between the first and the last event: what was computation, what was communication that nothing was
    computed beside, and what was neither.

    Args:
        events: torch's `FunctionEvent`s. Where there are any of a GPU, they alone count: kernels and copies; else
            operators on CPUs.
    """
    events = [event for event in events if not event.is_user_annotation]
    on_gpu = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    counted = on_gpu or events
    if not counted:
        return {}
    communication = merged(_interval(event) for event in counted if _is_communication(event.name))
    computation = merged(_interval(event) for event in counted if not _is_communication(event.name))
    if not on_gpu:  # an operator that waits for a collective is none that computes
        computation = without(computation, communication)
    begin = min(event.time_range.start for event in events)
    whole = max(event.time_range.end for event in events) - begin
    computing = _length(computation)
    communicating = _length(without(communication, computation))
    return {
        "profile/computation_share": computing / whole,
        "profile/communication_share": communicating / whole,
        "profile/nothing_share": max(0.0, 1 - (computing + communicating) / whole),
    }


def _is_communication(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION)


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of `intervals` is in none of `others`; both merged."""
    left, at = [], 0
    for begin, end in intervals:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        number = at
        while number < len(others) and others[number][0] < end:
            if others[number][0] > begin:
                left.append((begin, others[number][0]))
            begin = max(begin, others[number][1])
            number += 1
        if begin < end:
            left.append((begin, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
