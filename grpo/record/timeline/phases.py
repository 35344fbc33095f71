"""When the GPU did what, without waiting for it: CUDA events around each phase, which are read a step later."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo.record.timeline.recorder import Recorder

ANCHOR_EVERY_S = 60.0  # a GPU's clock and ours drift apart by microseconds in that time
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
    """An event of which we know when the GPU came to it."""

    event: Any
    order: int
    """How many phases were queued before it."""
    seen_s: float
    """By `time.monotonic`."""

    def moment(self, event: Any, *, is_later: bool) -> float:
        """When the GPU came to `event`, by `time.monotonic`. CUDA counts from the earlier one of two events."""
        if is_later:
            return self.seen_s + self.event.elapsed_time(event) / 1000
        return self.seen_s - event.elapsed_time(self.event) / 1000


class Phases:
    """Spans of what a rank has its GPU do; on CPUs, where a call returns when it is done, of the calls.

    `measured` and `settle` are the main thread's. No call waits for the GPU: a thread polls one event a minute, from
    which the times of all others are counted.

    Args:
        on_gpu: whether this rank trains on one.
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
        """Around the calls that queue a phase."""
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
        """At the end of a step: tell of the phases that the GPU has come to the end of."""
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
        with contextlib.suppress(RuntimeError):  # the GPU is lost: the main thread hears of it
            while not event.query():
                time.sleep(_POLL_S)
            self._anchor = _Anchor(event=event, order=order, seen_s=time.monotonic())


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
