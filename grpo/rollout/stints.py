"""When an engine has something to sample, and when it has not."""

import time

from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import GENERATE


class IdleClock:
    """How long an engine has nothing to sample, and how long it samples."""

    def __init__(self) -> None:
        self._idle_s = self._busy_s = 0.0
        self._since = time.monotonic()
        self._idle = True
        self._paused = False

    def _run(self) -> None:
        before, self._since = self._since, time.monotonic()
        if self._paused:
            return
        if self._idle:
            self._idle_s += self._since - before
        else:
            self._busy_s += self._since - before

    def set(self, idle: bool) -> None:
        self._run()
        self._idle = idle

    def pause(self) -> None:
        self._run()
        self._paused = True

    def resume(self) -> None:
        self._run()
        self._paused = False

    def take_s(self) -> float:
        """Idle seconds since the last call."""
        self._run()
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def take_busy_s(self) -> float:
        """Seconds of sampling since the last call."""
        self._run()
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s


class Stints:
    """Records each time in which an engine has something to sample, from its first request to its last answer; one
    that never rests is recorded from push to push."""

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

    def cut(self, policy_version: int) -> None:
        """End the entry of an engine that goes on, and begin another one."""
        if self._since is not None:
            self.set(True, policy_version)
            self.set(False, policy_version)

    def note(self, num_tokens: int) -> None:
        """A completion of so many tokens has come."""
        self._tokens += num_tokens
        self._requests += 1
