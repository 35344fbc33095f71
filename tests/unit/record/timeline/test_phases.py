"""Phases on a GPU that is made up: events come later than the calls that queue them."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.record.timeline.phases import Phases
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import BACKWARD, FORWARD, AttemptLine, Span, read_timelines, timeline_path

PATIENCE_S = 60.0


class Gpu:
    """Comes to what is queued when it is asked to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queued: list[Event] = []

    def run(self, *seconds: float) -> None:
        """Come to the next events, so long after each other."""
        for each in seconds:
            self.now_s += each
            self.queued.pop(0).at_s = self.now_s


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at_s = gpu, -1.0

    def record(self) -> None:
        self.gpu.queued.append(self)

    def query(self) -> bool:
        return self.at_s >= 0

    def elapsed_time(self, later: "Event") -> float:
        assert self.query()
        assert later.query()
        assert later.at_s >= self.at_s, "CUDA says nothing of the time between a later event and an earlier one"
        return (later.at_s - self.at_s) * 1000


def spans(folder: Path) -> list[Span]:
    return [span for timeline in read_timelines(folder) for span in timeline.spans]


def recorder(folder: Path) -> Recorder:
    return Recorder(timeline_path(folder, 0), AttemptLine(attempt=0, node=0, host="h", time=0.0, ranks=[0]))


def test_phases_on_gpu_place_spans_at_event_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, timeline = Gpu(), recorder(tmp_path)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(gpu))
    phases = Phases(timeline, on_gpu=True)
    with phases.measured(FORWARD):
        pass
    phases.settle()  # queues the anchor
    gpu.run(1.0, 2.0)  # the forward is done, the anchor not yet
    phases.settle()
    gpu.run(0.5)
    deadline = time.monotonic() + PATIENCE_S
    while phases._anchor is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    anchored = timeline.at(phases._anchor.seen_s)
    timeline.step = 1
    with phases.measured(BACKWARD):
        pass
    gpu.run(4.0)  # has begun, and not ended
    phases.settle()
    timeline.step = 2
    gpu.run(0.25)
    phases.settle()
    timeline.close()
    forward, backward = spans(tmp_path)
    assert (forward.phase, forward.step, forward.on_gpu) == (FORWARD, 0, True)
    assert (backward.phase, backward.step, backward.on_gpu) == (BACKWARD, 1, True)
    assert abs(forward.begin - (anchored - 2.5)) < 1e-3
    assert abs(forward.end - (anchored - 0.5)) < 1e-3
    assert abs(backward.begin - (anchored + 4.0)) < 1e-3
    assert abs(backward.end - (anchored + 4.25)) < 1e-3


def test_phases_on_cpu_measure_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", pytest.fail)
    timeline = recorder(tmp_path)
    phases = Phases(timeline, on_gpu=False)
    with phases.measured(FORWARD):
        time.sleep(0.001)
    phases.settle()
    timeline.close()
    assert [(span.phase, span.on_gpu) for span in spans(tmp_path)] == [(FORWARD, False)]


def test_phases_without_timeline_make_no_cuda_events(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options))
    phases = Phases(Recorder(), on_gpu=True)
    with phases.measured(FORWARD):
        pass
    phases.settle()
    assert made == []
