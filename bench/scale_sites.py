"""Engines that share a queue, simulated completion by completion: `bench/scale_lengths.py` has what they stand for."""

import heapq
from collections import Counter, deque
from collections.abc import Sequence

STEP_S, SEQUENCE_S = 8e-3, 0.042e-3  # of a decoding step: alone, and for each sequence


class _Engine:
    __slots__ = ("at_s", "busy_s", "made", "planned", "running", "sequence_s", "speed", "step_s")

    def __init__(self, speed: float, step_s: float, sequence_s: float) -> None:
        self.speed, self.step_s, self.sequence_s = speed, step_s, sequence_s
        self.made = 0.0  # tokens that a sequence has got that ran from the beginning
        self.at_s = 0.0  # when that was so; after `now` while the engine stands still
        self.busy_s = 0.0
        self.running: list[tuple[float, int, int]] = []  # `made` at its end, batch, tokens
        self.planned = 0  # the events before it no longer count

    @property
    def tokens_per_s(self) -> float:
        """Of each sequence."""
        return self.speed / (self.step_s + self.sequence_s * len(self.running))

    def advance(self, now: float) -> None:
        if now > self.at_s:
            if self.running:
                self.busy_s += now - self.at_s
                self.made += self.tokens_per_s * (now - self.at_s)
            self.at_s = now


class Site:
    """Engines that share one queue."""

    def __init__(
        self, speeds: Sequence[float], places: int, *, step_s: float = STEP_S, sequence_s: float = SEQUENCE_S
    ) -> None:
        self.engines = [_Engine(speed, step_s, sequence_s) for speed in speeds]
        self.places = places
        self.now = 0.0
        self.tokens = 0
        self.left: Counter[int] = Counter()  # completions of each batch
        self.ends_s: dict[int, float] = {}  # of each batch's completions so far
        self._queue: deque[tuple[int, int]] = deque()
        self._events: list[tuple[float, int, int]] = []  # the next end of an engine, its number, its `planned`

    @property
    def owed(self) -> int:
        return self.left.total()

    @property
    def busy_s(self) -> float:
        return sum(engine.busy_s for engine in self.engines)

    def add(self, batch: int, lengths: Sequence[int]) -> None:
        """Ask for completions; they go to the engines with the fewest sequences, as long as these have places."""
        self.left[batch] += len(lengths)
        self._queue.extend((batch, length) for length in lengths)
        free = [(len(engine.running) / engine.speed, number) for number, engine in enumerate(self.engines)]
        heapq.heapify(free)
        changed = set()
        while self._queue and free:
            _, number = heapq.heappop(free)
            engine = self.engines[number]
            if len(engine.running) < self.places:
                engine.advance(self.now)
                self._start(engine)
                changed.add(number)
                heapq.heappush(free, (len(engine.running) / engine.speed, number))
        for number in changed:
            self._plan(number)

    def run_to(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self._end()
        self.now = max(self.now, until_s)
        for engine in self.engines:
            engine.advance(self.now)

    def finish(self, batch: int) -> float:
        """Run until the last completion of a batch is there, and return when that was."""
        while self.left[batch]:
            self._end()
        return self.ends_s.get(batch, 0.0)

    def pause(self, seconds: float) -> None:
        """Stand still from now on."""
        for number, engine in enumerate(self.engines):
            engine.advance(self.now)
            engine.at_s += seconds
            self._plan(number)

    def change_speed(self, factor: float) -> None:
        """Be so many times as fast from now on."""
        for number, engine in enumerate(self.engines):
            engine.advance(self.now)
            engine.speed *= factor
            self._plan(number)

    def _start(self, engine: _Engine) -> None:
        batch, length = self._queue.popleft()
        heapq.heappush(engine.running, (engine.made + length, batch, length))

    def _plan(self, number: int) -> None:
        engine = self.engines[number]
        engine.planned += 1
        if engine.running:
            end_s = engine.at_s + (engine.running[0][0] - engine.made) / engine.tokens_per_s
            heapq.heappush(self._events, (end_s, number, engine.planned))

    def _end(self) -> None:
        """The next completion's end, if it still counts."""
        end_s, number, planned = heapq.heappop(self._events)
        engine = self.engines[number]
        if planned != engine.planned:
            return
        self.now = max(self.now, end_s)
        engine.advance(end_s)
        _, batch, length = heapq.heappop(engine.running)
        self.tokens += length
        self.left[batch] -= 1
        self.ends_s[batch] = self.now
        if self._queue:
            self._start(engine)
        self._plan(number)
