"""Statistics of engines: sampled tokens, idle time, and non-finite log-probabilities."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from grpo.engine.messages import Sampled
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import GENERATE


class IdleClock:
    """Timer of an engine's idle and busy time."""

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
        """Return idle seconds since the last call."""
        self._run()
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def take_busy_s(self) -> float:
        """Return seconds of sampling since the last call."""
        self._run()
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s


class Stints:
    """Records the busy periods of an engine, from its first request to its last answer; an engine without idle times
    gets one entry per weight sync."""

    def __init__(self, timeline: Recorder, engine: int) -> None:
        self._timeline, self._lane = timeline, f"engine {engine}"
        self._since: float | None = None
        self._step = self._policy_version = self._tokens = self._requests = 0

    def set(self, idle: bool, policy_version: int) -> None:
        """Update after every change of its load."""
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
        """End the entry of a busy engine, and begin another one."""
        if self._since is not None:
            self.set(True, policy_version)
            self.set(False, policy_version)

    def note(self, num_tokens: int) -> None:
        """Count a finished completion."""
        self._tokens += num_tokens
        self._requests += 1


MAX_SHARE = 0.01
"""Largest share of an engine's tokens since the last report; a sound engine has none. TRL trains on such a token as if
engine and trainer agreed (1.16), which is harmless for a hundredth of a batch. An engine with broken weights or kernels
has nothing else."""


class FiniteCheck:
    """Counts non-finite log-probabilities of a node's engines.

    Args:
        node: of the engines.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._tokens: Counter[int] = Counter()  # by engine
        self._not_finite: Counter[int] = Counter()

    def note(self, engine: int, logprobs: np.ndarray) -> None:
        """Count a completion's values."""
        self._tokens[engine] += len(logprobs)
        self._not_finite[engine] += len(logprobs) - int(np.isfinite(logprobs).sum())

    def take(self) -> tuple[int, str | None]:
        """Return the count since the last call, and an error text about the worst engine, if it has too many."""
        tokens, self._tokens = self._tokens, Counter()
        counts, self._not_finite = self._not_finite, Counter()
        shares = {engine: counts[engine] / tokens[engine] for engine in tokens if tokens[engine]}
        worst = max(shares, key=lambda engine: shares[engine], default=None)
        if worst is None or shares[worst] <= MAX_SHARE:
            return counts.total(), None
        return counts.total(), (
            f"engine {worst} of node {self._node} gave {counts[worst]} of {tokens[worst]} tokens log-probabilities "
            f"that are no finite numbers; more than {MAX_SHARE:.0%} end the job [GRPO-417]"
        )


class Accounts:
    """Idle and busy time, tokens, and non-finite values of a node's engines.

    Args:
        lock: the pool's. Methods that begin with `take`, and `busy_otherwise`, acquire it themselves.
    """

    def __init__(self, lock: threading.Condition, *, num_engines: int, node: int, timeline: Recorder) -> None:
        self._lock = lock
        self._finite = FiniteCheck(node)
        self._clocks = [IdleClock() for _ in range(num_engines)]
        self._stints = [Stints(timeline, engine) for engine in range(num_engines)]
        self._num_tokens = 0

    def set(self, engine: int, *, is_idle: bool, policy_version: int) -> None:
        """Update after every change of an engine's load."""
        self._clocks[engine].set(is_idle)
        self._stints[engine].set(is_idle, policy_version)

    def cut(self, policy_version: int) -> None:
        """Begin new timeline entries for busy engines: they have new weights."""
        for stint in self._stints:
            stint.cut(policy_version)

    def note(self, engine: int, answer: Sampled) -> None:
        num_tokens = len(answer.token_ids) - answer.num_begun
        self._num_tokens += num_tokens
        self._stints[engine].note(num_tokens)
        self._finite.note(engine, answer.engine_logprobs)

    def take_not_finite(self) -> tuple[int, str | None]:
        """See `FiniteCheck.take`."""
        with self._lock:
            return self._finite.take()

    def take_idle_s(self) -> float:
        """Return idle seconds since the last call, the mean over engines."""
        with self._lock:
            return sum(clock.take_s() for clock in self._clocks) / len(self._clocks)

    def take_sampled(self) -> tuple[int, float]:
        """Return tokens of all completions ended since the last call, and seconds of sampling, the mean over
        engines."""
        with self._lock:
            num_tokens, self._num_tokens = self._num_tokens, 0
            return num_tokens, sum(clock.take_busy_s() for clock in self._clocks) / len(self._clocks)

    @contextlib.contextmanager
    def busy_otherwise(self) -> Iterator[None]:
        """Exclude a `with` block from idle and busy time: a weight sync that pauses the engines."""
        with self._lock:
            for clock in self._clocks:
                clock.pause()
        try:
            yield
        finally:
            with self._lock:
                for clock in self._clocks:
                    clock.resume()
