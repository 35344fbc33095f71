"""Timing of GPU work without waiting for it: CUDA events around each phase, read a step later."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo.record.timeline.recorder import Recorder

ANCHOR_EVERY_S = 60.0  # the clocks of GPU and host drift apart by microseconds in that time
_POLL_S = 0.0005
_MAX_PENDING = 4096


@dataclass(slots=True, kw_only=True)
class _Measured:
    phase: str
    step: int
    order: int
    begin: Any
    end: Any


@dataclass(slots=True, kw_only=True)
class _Anchor:
    """A CUDA event with a known time on the host."""

    event: Any
    order: int
    """Number of phases queued before it."""
    seen_s: float
    """Time of the event by `time.monotonic`."""

    def moment(self, event: Any, *, is_later: bool) -> float:
        """Time of `event` by `time.monotonic`. CUDA measures from the earlier of two events."""
        if is_later:
            return self.seen_s + self.event.elapsed_time(event) / 1000
        return self.seen_s - event.elapsed_time(self.event) / 1000


class Phases:
    """Spans of a rank's GPU work; on CPUs, where calls are synchronous, of the calls.

    The main thread calls `measured` and `settle`. No call waits for the GPU: a thread polls one event per minute, and
    all other times are relative to it.

    Args:
        on_gpu: this rank trains on a GPU.
    """

    def __init__(self, timeline: Recorder, *, on_gpu: bool) -> None:
        self._timeline = timeline
        self._on_gpu = on_gpu and timeline.is_on
        self._pending: deque[_Measured] = deque(maxlen=_MAX_PENDING)
        self._queued = 0
        self._anchor: _Anchor | None = None
        self._anchored_at = -ANCHOR_EVERY_S

    @contextlib.contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Measure the calls that queue a phase, in a `with` block."""
        if not self._on_gpu:
            with self._timeline.span(phase):
                yield
            return
        begin, end, step = _timed_event(), _timed_event(), self._timeline.step
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._pending.append(_Measured(phase=phase, step=step, order=self._queued, begin=begin, end=end))
            self._queued += 1

    def settle(self) -> None:
        """Record the phases the GPU has finished; called at the end of a step."""
        if not self._on_gpu:
            return
        anchor = self._anchor
        while anchor is not None and self._pending and self._pending[0].end.query():
            measured = self._pending.popleft()
            is_later = measured.order >= anchor.order
            begin, end = (anchor.moment(event, is_later=is_later) for event in (measured.begin, measured.end))
            self._timeline.add(measured.phase, begin, end, step=measured.step, on_gpu=True)
        if time.monotonic() - self._anchored_at > ANCHOR_EVERY_S:
            self._anchored_at = time.monotonic()
            event = _timed_event()
            event.record()
            threading.Thread(target=self._await, args=[event, self._queued], name="grpo-anchor", daemon=True).start()

    def _await(self, event: Any, order: int) -> None:
        with contextlib.suppress(RuntimeError):  # the GPU is lost: the main thread gets the error
            while not event.query():
                time.sleep(_POLL_S)
            self._anchor = _Anchor(event=event, order=order, seen_s=time.monotonic())


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
