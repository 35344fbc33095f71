"""Spare groups: selection of the groups to train on, and redistribution of their rows to ranks.

A batch samples more groups than it trains on. Groups with different rewards come first, in the order of their numbers;
flat ones, which give no gradient, fill up. So the sampled groups are fixed in advance, and no completion is preferred
for finishing early (as in rounds of DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo.groups.node_groups import NodeGroups
from grpo.place.wire import from_json, to_json
from grpo.rollout.packing import Completions, as_words, concat_completions, split_completions


def flat_groups(rewards: np.ndarray) -> np.ndarray:
    """Find groups whose scored completions all have exactly the same reward. [groups] bool.

    Args:
        rewards: [groups, n, objectives]; NaN for an unscored completion. A group is flat if it is flat in each
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
    """Select the groups to train on, ascending: the first ones that are not flat, then the first flat ones.
    [num_groups].

    Example:
        >>> chosen_groups(np.array([True, False, True, False]), 3)
        array([0, 1, 3])
    """
    by_worth = np.argsort(is_flat, kind="stable")
    return np.sort(by_worth[:num_groups])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DealtRows:
    """Rows of a rank."""

    completions: Completions
    texts: list[str]
    """Data of each row beside its tokens, as JSON."""

    def to_message(self) -> np.ndarray:
        """[.] int32: the completions, the length of the texts in bytes, the texts."""
        data = to_json(self.texts, list[str]).encode()
        return np.concatenate([self.completions.to_message(), [len(data)], as_words(data)], dtype=np.int32)

    @staticmethod
    def from_message(message: np.ndarray) -> "DealtRows":
        """Inverse of `to_message`; trailing data is ignored."""
        completions = Completions.from_message(message)
        begin = 1 + 3 * completions.num_completions + 2 * len(completions.token_ids)
        data = message[begin + 1 :].tobytes()[: int(message[begin])]
        return DealtRows(completions=completions, texts=from_json(data, list[str]))

    def one_by_one(self) -> "list[DealtRows]":
        each = split_completions(self.completions, [1] * self.completions.num_completions)
        return [DealtRows(completions=one, texts=[text]) for one, text in zip(each, self.texts, strict=True)]


def _together(rows: Sequence[DealtRows]) -> DealtRows:
    return DealtRows(
        completions=concat_completions([row.completions for row in rows]),
        texts=[text for row in rows for text in row.texts],
    )


def deal(groups: NodeGroups, mine: DealtRows, wanted: np.ndarray) -> DealtRows:
    """Send rows to the ranks that train on them. Collective over the job; a row is sent only where it is needed.

    Args:
        mine: this rank's rows; all ranks have the same number.
        wanted: [rows] numbers of the rows to train on, in the order of ranks, in equal shares. A rank's rows are
            numbered in the order of ranks too. The same on every rank.

    Returns:
        This rank's rows, in the order of `wanted`.
    """
    place, num_rows = groups.topology, len(mine.texts)
    share, first = len(wanted) // place.world_size, place.rank * num_rows
    node_of_rank = np.repeat(np.arange(place.num_nodes), [len(ranks) for ranks in place.nodes()])
    node_of = node_of_rank[wanted // num_rows]  # its present node
    node_for = np.repeat(node_of_rank, share)  # its destination
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
