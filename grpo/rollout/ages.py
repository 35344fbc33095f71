"""By the weights of which weight sync each token was sampled, where weight syncs come in the middle of completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where the engines stand."""

    step: int = 0
    """Optimizer steps of their weights: their policy version."""
    syncs: int = 0
    """Other policy versions that they have had before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """Of one completion that has ended."""

    first: Moment
    """When its first token was sampled."""
    token_syncs: int
    """`Moment.syncs` of each of its tokens, added up."""


class Ages:
    """Keeps for each completion under way when it began, and how many tokens it had at each weight sync since.

    Counts for metrics: with asynchronous scheduling a boundary may be one token off.
    """

    def __init__(self) -> None:
        self.now = Moment()
        self._first: dict[int, Moment] = {}
        self._boundaries: dict[int, list[int]] = {}

    def begin(self, completion: int, moment: Moment | None = None) -> None:
        """It goes to an engine, by the weights of now, or those of another moment until it ends."""
        self._first[completion] = moment or self.now
        self._boundaries.pop(completion, None)

    def sync(self, step: int, of_engines: Sequence[Mapping[int, int]] = ()) -> None:
        """From here on engines sample with the weights of `step`; once more for the same ones changes nothing.

        Args:
            of_engines: tokens that completions under way have, of each engine.
        """
        if step == self.now.step:
            return
        self.now = Moment(step=step, syncs=self.now.syncs + 1)
        for counts in of_engines:
            for completion, num_tokens in counts.items():
                if completion in self._first:
                    self._boundaries.setdefault(completion, []).append(num_tokens)

    def end(self, completion: int, num_tokens: int) -> Age:
        """It has so many tokens, and gets no more."""
        first = self._first.pop(completion, self.now)
        since = sum(max(0, num_tokens - before) for before in self._boundaries.pop(completion, ()))
        return Age(first=first, token_syncs=num_tokens * first.syncs + since)

    def first(self, completion: int) -> Moment:
        """When one that is under way began."""
        return self._first.get(completion, self.now)

    def forget(self, completion: int) -> None:
        self._first.pop(completion, None)
        self._boundaries.pop(completion, None)
