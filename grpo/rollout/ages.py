"""Ages of tokens: the weight sync each token was sampled with, for weight syncs during generation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Policy version of the engines at some time."""

    step: int = 0
    """Optimizer steps of their weights, that is their policy version."""
    syncs: int = 0
    """Number of earlier policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """Age of one finished completion."""

    first: Moment
    """Policy version at its first token."""
    token_syncs: int
    """Sum of `Moment.syncs` over its tokens."""


class Ages:
    """Tracks for each unfinished completion its start, and its number of tokens at each weight sync since.

    Counts are for metrics: with asynchronous scheduling a boundary may be one token off.
    """

    def __init__(self) -> None:
        self.now = Moment()
        self._first: dict[int, Moment] = {}
        self._boundaries: dict[int, list[int]] = {}

    def begin(self, completion: int, moment: Moment | None = None) -> None:
        """Record a completion sent to an engine, with the present weights, or with those of `moment` until it ends."""
        self._first[completion] = moment or self.now
        self._boundaries.pop(completion, None)

    def sync(self, step: int, of_engines: Sequence[Mapping[int, int]] = ()) -> None:
        """Record a weight sync: engines sample with the weights of `step` from now on. Repeating it for the same step
        has no effect.

        Args:
            of_engines: tokens so far of unfinished completions, by engine.
        """
        if step == self.now.step:
            return
        self.now = Moment(step=step, syncs=self.now.syncs + 1)
        for counts in of_engines:
            for completion, num_tokens in counts.items():
                if completion in self._first:
                    self._boundaries.setdefault(completion, []).append(num_tokens)

    def end(self, completion: int, num_tokens: int) -> Age:
        """Record the end of a completion with this number of tokens, and return its age."""
        first = self._first.pop(completion, self.now)
        since = sum(max(0, num_tokens - before) for before in self._boundaries.pop(completion, ()))
        return Age(first=first, token_syncs=num_tokens * first.syncs + since)

    def first(self, completion: int) -> Moment:
        """Return the start of an unfinished completion."""
        return self._first.get(completion, self.now)

    def forget(self, completion: int) -> None:
        self._first.pop(completion, None)
        self._boundaries.pop(completion, None)
