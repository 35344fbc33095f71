"""When an engine has something to sample, and when it has not."""

import time

from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import GENERATE


class IdleClock:
    """How long an engine has nothing to sample."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = time.monotonic()
        self._idle = True
        self._paused = False

    def _run(self) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._total_s += now - self._since
        self._since = now if self._idle and not self._paused else None

    def set(self, idle: bool) -> None:
        self._idle = idle
        self._run()

    def pause(self) -> None:
        self._paused = True
        self._run()

    def resume(self) -> None:
        self._paused = False
        self._run()

    def take_s(self) -> float:
        """Since the last call."""
        self._run()
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class Stints:
    """Records each time in which an engine has something to sample, from its first request to its last answer."""

    def __init__(self, timeline: Recorder, engine: int) -> None:
        self._timeline, self._lane = timeline, f"engine {engine}"
        self._since: float | None = None
        self._step = self._policy_version = self._tokens = self._requests = 0

    def set(self, idle: bool, policy_version: int) -> None:
        """After every change of what it holds."""
        if idle and self._since is not None:
            self._timeline.add(
                GENERATE,
                self._since,
                time.monotonic(),
                self._lane,
                step=self._step,
                tokens=self._tokens,
                requests=self._requests,
                policy_version=self._policy_version,
            )
            self._since = None
        elif not idle and self._since is None:
            self._since = time.monotonic()
            self._step, self._policy_version = self._timeline.step, policy_version
            self._tokens = self._requests = 0

    def note(self, num_tokens: int) -> None:
        """A completion of so many tokens has come."""
        self._tokens += num_tokens
        self._requests += 1
