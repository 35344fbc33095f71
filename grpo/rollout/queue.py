"""Scheduling of completions to engines: decisions alone, without threads, clocks and engines."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Completions of one prompt for one engine, which computes the prompt once."""

    ids: Sequence[int]
    tokens: int
    """Upper bound of each completion's tokens, prompt included."""
    home: int | None = None
    """Engine that may have the beginning of the prompt in its cache."""
    order: int = 0
    """Order of its batch: chunks of lower order are sent first."""
    is_rest: bool = False
    """True if an engine has its first completions already."""


@dataclass(slots=True, eq=False)
class _Engine:
    window: int
    held: dict[int, int] = field(default_factory=dict)
    """Tokens of each unanswered completion, by id."""
    tokens: int = 0
    """Sum over all held completions."""
    is_there: bool = True

    def space(self) -> int:
        """Number of free slots."""
        return self.window - len(self.held) if self.is_there else 0


class RequestQueue:
    """Queue of a node's unanswered completions, and their assignment to engines.

    An engine with a free slot takes the next chunk; completions of the chunk beyond its slots wait inside the engine.
    Other chunks wait here for the next engine with a free slot. With spare slots nothing waits inside an engine: a
    chunk is cut to the free slots, and the rest becomes the next chunk.

    Args:
        windows: number of completions each engine samples at once.
        num_spare: slots of each engine kept free, except for `send_alone`: requests outside this queue are served at
            once.
    """

    def __init__(self, windows: Sequence[int], num_spare: int = 0) -> None:
        assert min(windows, default=1) > num_spare >= 0, f"{num_spare} spare places of {windows}"
        self._engines = [_Engine(window - num_spare) for window in windows]
        self._cuts = num_spare > 0
        self._waiting: list[Chunk] = []  # the next one is last

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks to be sampled."""
        self._waiting += chunks
        # First by batch order, then the most expensive (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969),
        # then the oldest.
        self._waiting.sort(
            key=lambda chunk: (-chunk.order, chunk.is_rest, chunk.tokens * len(chunk.ids), -chunk.ids[0])
        )

    def send(self) -> list[tuple[int, Sequence[int]]]:
        """Return the completions to send now, as (engine, ids), in order. The engine holds them from here on.

        Each chunk goes to its home engine if it has a free slot, else to the one with a free slot and the fewest
        outstanding tokens.
        """
        sent: list[tuple[int, Sequence[int]]] = []
        while self._waiting:
            free = [number for number, engine in enumerate(self._engines) if engine.space() > 0]
            if not free:
                break
            chunk = self._waiting.pop()
            number = chunk.home if chunk.home in free else min(free, key=lambda number: self._engines[number].tokens)
            if self._cuts and (rest := chunk.ids[self._engines[number].space() :]):
                self._waiting.append(replace(chunk, ids=rest, home=number, is_rest=True))
                chunk = replace(chunk, ids=chunk.ids[: -len(rest)])
            sent += self._give(number, [chunk])
        return sent

    def send_alone(self, chunks: Sequence[Chunk]) -> list[tuple[int, Sequence[int]]]:
        """Send these chunks to one idle engine, as `send` does; they do not wait here. [] if there is none."""
        idle = [number for number, engine in enumerate(self._engines) if engine.is_there and not engine.held]
        return self._give(idle[0], chunks) if idle else []

    def _give(self, number: int, chunks: Iterable[Chunk]) -> list[tuple[int, Sequence[int]]]:
        engine, sent = self._engines[number], []
        for chunk in chunks:
            engine.held.update(dict.fromkeys(chunk.ids, chunk.tokens))
            engine.tokens += chunk.tokens * len(chunk.ids)
            sent.append((number, chunk.ids))
        return sent

    def all_sent(self) -> bool:
        """True if nothing waits for a free slot."""
        return not self._waiting

    def answered(self, number: int, completion: int) -> None:
        """Record an answer by engine `number`; the completion may have been dropped since."""
        engine = self._engines[number]
        engine.tokens -= engine.held.pop(completion, 0)

    def forget(self, completions: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Drop completions, in whole chunks; return which engine held which of them."""
        ids = set(completions)
        self._waiting = [chunk for chunk in self._waiting if chunk.ids[0] not in ids]
        taken = []
        for number, engine in enumerate(self._engines):
            if held := [completion for completion in engine.held if completion in ids]:
                taken.append((number, held))
                engine.tokens -= sum(engine.held.pop(completion) for completion in held)
        return taken

    def lose(self, number: int) -> list[int]:
        """Record the loss of engine `number`, which gets nothing until `regain`; return its unanswered completions, in
        order."""
        engine = self._engines[number]
        owed = sorted(engine.held)
        engine.held.clear()
        engine.tokens, engine.is_there = 0, False
        return owed

    def regain(self, number: int) -> None:
        """Record that engine `number` is back, and empty."""
        self._engines[number].is_there = True

    def has_engines(self) -> bool:
        return any(engine.is_there for engine in self._engines)

    def is_idle(self, number: int) -> bool:
        return not self._engines[number].held

    def fullest(self) -> int:
        """Return the number of the engine with the most completions in flight."""
        return max(range(len(self._engines)), key=lambda number: len(self._engines[number].held))


def ranges(ascending: Iterable[int]) -> Iterator[range]:
    """Group ascending numbers into ranges without gaps."""
    for _, run in itertools.groupby(enumerate(ascending), key=lambda each: each[1] - each[0]):
        numbers = [number for _, number in run]
        yield range(numbers[0], numbers[-1] + 1)
