"""`profile_steps`: torch's profiler over some optimizer steps, and the share of communication in them.

Works for NCCL and gloo: communication is recognised by torch's names (`nccl...` kernels, `gloo:...` and `c10d::...`
operators).
"""

import logging
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

from grpo.place.log import EVERY_RANK
from grpo.record.timeline.records import covered

_log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
_COMMUNICATION = ("nccl", "gloo:", "c10d::")


class ProfileSteps(TrainerCallback):
    """Profiles `steps`, counted from 1, on this rank; writes a Chrome trace and logs the shares of the time.

    Args:
        metrics: receives `profile/computation_share`, `profile/communication_share` and `profile/nothing_share` at the
            end of the last step. TRL logs rank 0's; every rank prints its own.
    """

    def __init__(self, steps: range, rank: int, metrics: MutableMapping[str, list[float]]) -> None:
        self._steps, self._rank, self._metrics = steps, rank, metrics
        self._profiler: Any = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        # An earlier attempt may have done steps before the first one.
        if self._profiler is None and self._steps and state.global_step + 1 in self._steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self._profiler is not None and state.global_step >= self._steps[-1]:
            self._finish(Path(args.output_dir))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._finish(Path(args.output_dir))

    def _finish(self, output_dir: Path) -> None:
        profiler, self._profiler, steps = self._profiler, None, self._steps
        self._steps = range(0)  # once per attempt
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # these steps are slower anyway
        profiler.stop()
        folder = output_dir / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self._rank}-steps{steps[0]}-{steps[-1]}.json.gz"
        profiler.export_chrome_trace(str(path))
        found = shares(profiler.events())
        self._metrics.update({name: [share] for name, share in found.items()})
        reported = ", ".join(f"{name[8:-6]} {share:.0%}" for name, share in found.items())
        found_in = f"{reported or 'nothing'}; {path}"
        _log.info("profile of rank %d, steps %d to %d: %s", self._rank, steps[0], steps[-1], found_in, extra=EVERY_RANK)


def shares(events: Iterable[Any]) -> dict[str, float]:
    """Split the time between the first and the last event into shares: computation, communication not overlapped by
    computation, and neither.

    Args:
        events: torch's `FunctionEvent`s. With events of a GPU, only those count (kernels and copies); otherwise
            operators on CPUs.
    """
    events = [event for event in events if not event.is_user_annotation]
    on_gpu = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    counted = on_gpu or events
    if not counted:
        return {}
    whole = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    either = _covered(counted)
    if on_gpu:
        computing = _covered(event for event in counted if not _is_communication(event.name))
        communicating = max(0.0, either - computing)
    else:  # an operator that waits for a collective does not compute
        communicating = _covered(event for event in counted if _is_communication(event.name))
        computing = max(0.0, either - communicating)
    return {
        "profile/computation_share": computing / whole,
        "profile/communication_share": communicating / whole,
        "profile/nothing_share": max(0.0, 1 - either / whole),
    }


def _is_communication(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION)


def _covered(events: Iterable[Any]) -> float:
    return covered((event.time_range.start, event.time_range.end) for event in events)
