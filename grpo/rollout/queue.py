"""Which engine samples which completion next: the decisions alone, without threads, clocks and engines."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Completions of one prompt that go to one engine, which computes the prompt once."""

    ids: Sequence[int]
    tokens: int
    """The most that each completion may take, its prompt included."""
    home: int | None = None
    """The engine that may hold the beginning of the prompt."""
    order: int = 0
    """Of its batch: none is sent before those of a lower one."""
    is_rest: bool = False
    """Whether an engine has the first completions of it already."""


@dataclass(slots=True, eq=False)
class _Engine:
    window: int
    held: dict[int, int] = field(default_factory=dict)
    """Tokens of each completion that was sent and not answered, by id."""
    tokens: int = 0
    """Of all that is held."""
    is_there: bool = True

    def space(self) -> int:
        """Places that are free."""
        return self.window - len(self.held) if self.is_there else 0


class RequestQueue:
    """The completions that a node owes, and which engine has them.

    An engine with a free place takes the next chunk, and what of it has no place there waits inside it. Everything else
    waits here, where whichever engine has a free place first takes it. Where places are spared nothing waits inside an
    engine: a chunk is cut to the places that are free, and the rest of it is the next one.

    Args:
        windows: of each engine, the completions that it samples at once.
        num_spare: places of each engine that are left free, but for what `send_alone` sends: what asks for one beside
            this queue is served at once.
    """

    def __init__(self, windows: Sequence[int], num_spare: int = 0) -> None:
        assert min(windows, default=1) > num_spare >= 0, f"{num_spare} spare places of {windows}"
        self._engines = [_Engine(window - num_spare) for window in windows]
        self._cuts = num_spare > 0
        self._waiting: list[Chunk] = []  # the next one is last

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that are to be sampled."""
        self._waiting += chunks
        # The batch that training takes first; of it the dearest (Graham, "Bounds on Multiprocessing Timing Anomalies",
        # 1969), of equals the oldest.
        self._waiting.sort(
            key=lambda chunk: (-chunk.order, chunk.is_rest, chunk.tokens * len(chunk.ids), -chunk.ids[0])
        )

    def send(self) -> list[tuple[int, Sequence[int]]]:
        """What is to be sent now: engine and completions, in this order. The engine holds them from here on.

        Each chunk goes home if there is space, else to the engine with space that has the fewest outstanding tokens.
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
        """As `send`, these chunks, which do not wait here, to one engine that holds nothing; [] if there is none."""
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
        """Whether nothing waits for an engine that has space."""
        return not self._waiting

    def answered(self, number: int, completion: int) -> None:
        """By engine `number`, which may since have been asked to forget it."""
        engine = self._engines[number]
        engine.tokens -= engine.held.pop(completion, 0)

    def forget(self, completions: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Nobody wants these any more, whole chunks: which engine held which of them."""
        ids = set(completions)
        self._waiting = [chunk for chunk in self._waiting if chunk.ids[0] not in ids]
        taken = []
        for number, engine in enumerate(self._engines):
            if held := [completion for completion in engine.held if completion in ids]:
                taken.append((number, held))
                engine.tokens -= sum(engine.held.pop(completion) for completion in held)
        return taken

    def lose(self, number: int) -> list[int]:
        """Engine `number` is gone, and is given nothing until `regain`: the completions that it owed, in order."""
        engine = self._engines[number]
        owed = sorted(engine.held)
        engine.held.clear()
        engine.tokens, engine.is_there = 0, False
        return owed

    def regain(self, number: int) -> None:
        """Engine `number` is back, and holds nothing."""
        self._engines[number].is_there = True

    def has_engines(self) -> bool:
        return any(engine.is_there for engine in self._engines)

    def is_idle(self, number: int) -> bool:
        return not self._engines[number].held

    def fullest(self) -> int:
        """The engine that holds most."""
        return max(range(len(self._engines)), key=lambda number: len(self._engines[number].held))


def ranges(ascending: Iterable[int]) -> Iterator[range]:
    """The same numbers as runs without gaps."""
    for _, run in itertools.groupby(enumerate(ascending), key=lambda each: each[1] - each[0]):
        numbers = [number for _, number in run]
        yield range(numbers[0], numbers[-1] + 1)
