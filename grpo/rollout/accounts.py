"""What each engine of a pool has done and when it had nothing to do; with the pool's lock held, and without threads."""

import contextlib
import threading
from collections.abc import Iterator

from grpo.engine.messages import Sampled
from grpo.record.timeline.recorder import Recorder
from grpo.rollout.finite import FiniteCheck
from grpo.rollout.stints import IdleClock, Stints


class Accounts:
    """Idle and busy time, tokens, and numbers that are none, of the engines of a node.

    Args:
        lock: the pool's. Methods that begin with `take` and `busy_otherwise` take it themselves.
    """

    def __init__(self, lock: threading.Condition, *, num_engines: int, node: int, timeline: Recorder) -> None:
        self._lock = lock
        self._finite = FiniteCheck(node)
        self._clocks = [IdleClock() for _ in range(num_engines)]
        self._stints = [Stints(timeline, engine) for engine in range(num_engines)]
        self._num_tokens = 0

    def set(self, engine: int, *, is_idle: bool, policy_version: int) -> None:
        """After every change of what an engine holds."""
        self._clocks[engine].set(is_idle)
        self._stints[engine].set(is_idle, policy_version)

    def cut(self, policy_version: int) -> None:
        """Engines that never rest have new weights: what follows is another entry of the timeline."""
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
        """Seconds since the last call in which an engine had nothing to sample, in the mean over engines."""
        with self._lock:
            return sum(clock.take_s() for clock in self._clocks) / len(self._clocks)

    def take_sampled(self) -> tuple[int, float]:
        """Tokens of what has ended since the last call, of all engines, and in how many seconds of sampling: the mean
        over engines."""
        with self._lock:
            num_tokens, self._num_tokens = self._num_tokens, 0
            return num_tokens, sum(clock.take_busy_s() for clock in self._clocks) / len(self._clocks)

    @contextlib.contextmanager
    def busy_otherwise(self) -> Iterator[None]:
        """Around a push that engines wait for: this time counts neither as idle nor as sampling."""
        with self._lock:
            for clock in self._clocks:
                clock.pause()
        try:
            yield
        finally:
            with self._lock:
                for clock in self._clocks:
                    clock.resume()
