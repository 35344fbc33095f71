"""Spare groups: which groups of a batch are trained on, and how their rows come to the ranks that train on them.

A batch samples more groups than it trains on. Those with spread in their rewards come first, in the order of their
numbers; flat ones, which teach nothing, fill up. So which groups a batch has is known before anything is sampled, and
no completion is preferred for coming early (as in rounds of DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo.groups.node_groups import NodeGroups
from grpo.place.wire import Wire
from grpo.rollout.packing import Completions, concat_completions, split_completions


def flat_groups(rewards: np.ndarray) -> np.ndarray:
    """Which groups have no spread: whoever was scored has exactly the same reward. [groups] bool.

    Args:
        rewards: [groups, n, objectives]; NaN where a completion was not scored. A group is flat where it is so in each
            objective.

    Example:
        >>> flat_groups(np.array([[[1.0], [1.0]], [[0.0], [1.0]], [[np.nan], [1.0]]]))
        array([ True, False,  True])
    """
    known = ~np.isnan(rewards)
    largest = np.where(known, rewards, -np.inf).max(1)
    smallest = np.where(known, rewards, np.inf).min(1)
    return (largest <= smallest).all(1)


def chosen_groups(is_flat: np.ndarray, num_groups: int) -> np.ndarray:
    """The numbers of the groups to train on, ascending: the first with spread, then the first flat ones. [num_groups].

    Example:
        >>> chosen_groups(np.array([True, False, True, False]), 3)
        array([0, 1, 3])
    """
    by_worth = np.argsort(is_flat, kind="stable")
    return np.sort(by_worth[:num_groups])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts(Wire):
    """What rows have beside their tokens, as JSON."""

    texts: list[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DealtRows:
    """Rows of a rank."""

    completions: Completions
    texts: list[str]
    """Of each row what it has beside its tokens, as JSON."""

    def to_message(self) -> np.ndarray:
        """[.] int32: the completions, the length of the texts in bytes, the texts."""
        data = _Texts(texts=self.texts).dumps().encode()
        words = np.frombuffer(data + bytes(-len(data) % 4), np.int32)
        return np.concatenate([self.completions.to_message(), [len(data)], words], dtype=np.int32)

    @staticmethod
    def from_message(message: np.ndarray) -> "DealtRows":
        """What `to_message` was given; there may be more behind it."""
        completions = Completions.from_message(message)
        begin = 1 + 3 * completions.num_completions + 2 * len(completions.token_ids)
        data = message[begin + 1 :].tobytes()[: int(message[begin])]
        return DealtRows(completions=completions, texts=_Texts.loads(data).texts)

    def one_by_one(self) -> "list[DealtRows]":
        each = split_completions(self.completions, [1] * self.completions.num_completions)
        return [DealtRows(completions=one, texts=[text]) for one, text in zip(each, self.texts, strict=True)]


def _together(rows: Sequence[DealtRows]) -> DealtRows:
    return DealtRows(
        completions=concat_completions([row.completions for row in rows]),
        texts=[text for row in rows for text in row.texts],
    )


def deal(groups: NodeGroups, mine: DealtRows, wanted: np.ndarray) -> DealtRows:
    """Bring rows to the ranks that train on them. Collective over the job; every row goes where it is wanted, and no
    further.

    Args:
        mine: this rank's rows; all ranks have equally many.
        wanted: [rows] the numbers of the rows to train on, in the order of ranks, which get equally many of them. A
            rank's rows have numbers in the order of ranks, too. The same on every rank.

    Returns:
        Those of this rank, in the order of `wanted`.
    """
    place, num_rows = groups.topology, len(mine.texts)
    share, first = len(wanted) // place.world_size, place.rank * num_rows
    node_of_rank = np.repeat(np.arange(place.num_nodes), [len(ranks) for ranks in place.nodes()])
    node_of = node_of_rank[wanted // num_rows]  # where it is
    node_for = np.repeat(node_of_rank, share)  # where it goes
    own = {int(row) for row in wanted if first <= row < first + num_rows}
    leaving = sorted(own)
    each = mine.one_by_one()
    messages = groups.gather(_together([each[row - first] for row in leaving]).to_message())
    if not place.is_local_main:
        return DealtRows.from_message(groups.scatter([]))
    of_node = sorted({int(row) for row in wanted[node_of == place.node]})
    found = dict(
        zip(of_node, (row for message in messages for row in DealtRows.from_message(message).one_by_one()), strict=True)
    )
    outgoing, sources = {}, set[int]()
    for node in range(place.num_nodes):
        if node == place.node:
            continue
        away = wanted[(node_for == node) & (node_of == place.node)]
        if len(away):
            outgoing[node] = _together([found[int(row)] for row in away]).to_message()
        if ((node_for == place.node) & (node_of == node)).any():
            sources.add(node)
    if place.num_nodes > 1:
        for node, message in groups.exchange_between_nodes(outgoing, sources).items():
            came = wanted[(node_for == place.node) & (node_of == node)]
            found |= dict(zip(map(int, came), DealtRows.from_message(message).one_by_one(), strict=True))
    of_ranks = wanted[node_for == place.node].reshape(place.local_world_size, share)
    parts = [_together([found[int(row)] for row in rows]) for rows in of_ranks]
    return DealtRows.from_message(groups.scatter([part.to_message() for part in parts]))
