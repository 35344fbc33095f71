"""Which engine samples which completion next: the decisions alone, without threads, clocks and engines."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Engine:
    window: int
    held: dict[int, int] = field(default_factory=dict)
    """Tokens of each completion that was sent and not answered, by id."""
    tokens: int = 0
    """Of all that is held."""
    is_there: bool = True

    def has_room(self) -> bool:
        return self.is_there and len(self.held) < self.window


class RequestQueue:
    """The completions that a node owes, and which engine has them.

    Completions of one prompt come in chunks. A chunk goes to one engine as a whole, which computes the prompt once.
    An engine with a free place takes the next one, and what has no place there waits inside it: less than a chunk.
    Everything else waits here, where whichever engine has a free place first takes it.

    Args:
        windows: of each engine, the completions that it samples at once.
    """

    def __init__(self, windows: Sequence[int]) -> None:
        self._engines = [_Engine(window) for window in windows]
        self._waiting: list[tuple[int, Sequence[int]]] = []  # tokens of a completion, and ids; the next chunk is last
        self._homes: dict[int, int] = {}  # by the first id of a chunk that waits

    def add(self, chunks: Iterable[tuple[int, Sequence[int]]], homes: Mapping[int, int] | None = None) -> None:
        """Chunks that are to be sampled: the most tokens that each completion may take, and the ids of these.

        Args:
            homes: by the first id of a chunk, the engine that may hold the beginning of its prompt.
        """
        self._homes.update(homes or {})
        self._waiting += chunks
        # The dearest first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969), of equals the oldest.
        self._waiting.sort(key=lambda each: (each[0] * len(each[1]), -each[1][0]))

    def send(self) -> list[tuple[int, Sequence[int]]]:
        """What is to be sent now: engine and completions, in this order. The engine holds them from here on.

        Each chunk goes home if there is room, else to the engine with room that has the fewest outstanding tokens.
        """
        sent: list[tuple[int, Sequence[int]]] = []
        while self._waiting:
            tokens, chunk = self._waiting[-1]
            roomy = [number for number, engine in enumerate(self._engines) if engine.has_room()]
            if not roomy:
                break
            self._waiting.pop()
            home = self._homes.pop(chunk[0], None)
            number = home if home in roomy else min(roomy, key=lambda number: self._engines[number].tokens)
            engine = self._engines[number]
            engine.held.update(dict.fromkeys(chunk, tokens))
            engine.tokens += tokens * len(chunk)
            sent.append((number, chunk))
        return sent

    def all_sent(self) -> bool:
        """Whether nothing waits for an engine that has room."""
        return not self._waiting

    def answered(self, number: int, completion: int) -> None:
        """By engine `number`, which may since have been told to forget it."""
        engine = self._engines[number]
        engine.tokens -= engine.held.pop(completion, 0)

    def forget(self, completions: Iterable[int]) -> list[tuple[int, list[int]]]:
        """Nobody wants these any more, whole chunks: which engine held which of them."""
        ids = set(completions)
        for completion in ids:
            self._homes.pop(completion, None)
        self._waiting = [each for each in self._waiting if each[1][0] not in ids]
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
