"""Balancing of requests between nodes (`vllm_balance_nodes`): from slow nodes to fast ones, and to nodes with more
engines per rank.

Runs over the local mains. A request is moved with its seed, so a row's completion is the same wherever it is sampled,
and returns to the requesting node. With several batches in progress, a node's engines may still owe completions of
earlier ones when the next batch is distributed: these count as load, so a lastingly slow node gets fewer new requests,
and its backlog stays in proportion to its speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.groups.node_groups import NodeGroups
from grpo.rollout.packing import Completions, Request, concat_completions, split_completions

TOLERANCE = 0.05  # normal variation of a node's tokens/s between batches; smaller differences move nothing
SMOOTHING = 0.5  # weight of the last batch in a node's tokens/s
BACKLOG_SMOOTHING = 0.25  # the same while earlier batches are in progress: they absorb the variation


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Requests to be sampled by another node.

    Example:
        Move(source=2, target=0, requests=(5, 6, 7))
    """

    source: int
    """Requesting node."""
    target: int
    """Sampling node."""
    requests: tuple[int, ...]
    """Indices of the source's requests, ascending."""


def plan_moves(
    completions: Sequence[Sequence[int]], tokens_per_s: Sequence[float], owed: Sequence[int] | None = None
) -> list[Move]:
    """Plan moves of requests, so that all nodes finish at about the same time.

    One by one, requests are moved from the node that would finish last to the one that would then finish first, as long
    as that ends earlier. Nothing is moved if the last node is within `TOLERANCE` of the ideal. A node left with one
    request, late because of its backlog, is excluded, and the others are balanced without it. A pure function: every
    local main computes the same plan.

    Args:
        completions: for each node, the completions of each of its requests.
        tokens_per_s: for each node, above 0.
        owed: for each node, unfinished completions of earlier batches in its engines, whichever node requested them;
            None: nothing.

    Returns:
        At most one move for each pair of nodes. A receiving node sends none.
    """
    backlog = [0] * len(completions) if owed is None else owed
    loads = [each + sum(of_node) for each, of_node in zip(backlog, completions, strict=True)]
    levelled = list(range(len(completions)))
    kept = [len(of_node) for of_node in completions]  # a node sends its last requests first
    moved: dict[tuple[int, int], list[int]] = {}
    while levelled:
        ideal_s = sum(loads[node] for node in levelled) / sum(tokens_per_s[node] for node in levelled)
        source = max(levelled, key=lambda node: loads[node] / tokens_per_s[node])
        ends_s = loads[source] / tokens_per_s[source]
        if ends_s <= ideal_s * (1 + TOLERANCE) or any(target == source for _, target in moved):
            break
        if kept[source] <= 1:
            if not backlog[source]:
                break  # all wait for this request, whatever the others do
            levelled.remove(source)
            continue
        size = completions[source][kept[source] - 1]
        givers = {giver for giver, _ in moved} | {source}
        takers = [node for node in range(len(completions)) if node not in givers]
        target = min(takers, key=lambda node: (loads[node] + size) / tokens_per_s[node], default=source)
        if target == source or (loads[target] + size) / tokens_per_s[target] >= ends_s:
            break
        kept[source] -= 1
        loads[source] -= size
        loads[target] += size
        moved.setdefault((source, target), []).append(kept[source])
    return [
        Move(source=source, target=target, requests=tuple(sorted(requests)))
        for (source, target), requests in sorted(moved.items())
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """Distribution of a batch's requests, as seen by one node."""

    asked: Sequence[Request]
    """Requests of this node's ranks."""
    moves: Sequence[Move]
    """Moves of the whole job."""
    sampled: Sequence[Request]
    """Requests sampled by this node's engines: kept ones first, then received ones, by source."""


class NodeBalance:
    """Balancing on this node. Only local mains have one; all call the same methods in the same order.

    Args:
        engines: of each node; assumed equal until they have been measured.
        by_speed: measure them. If False, a batch is always distributed in the same way, also by a resumed job.
    """

    def __init__(self, groups: NodeGroups, engines: Sequence[int], *, by_speed: bool = True) -> None:
        self._groups = groups
        self._node = groups.topology.node
        self._engines, self._by_speed = engines, by_speed
        self._tokens_per_s = [0.0] * groups.topology.num_nodes  # not measured yet
        self._smoothing = SMOOTHING

    def note(self, tokens_per_s: Sequence[float]) -> None:
        """Record the nodes' speeds in the last batch; the same on every local main. 0: nothing was sampled there."""
        for node, (old, new) in enumerate(zip(self._tokens_per_s, tokens_per_s, strict=True)):
            if new > 0 and self._by_speed:
                self._tokens_per_s[node] = self._smoothing * new + (1 - self._smoothing) * (old or new)

    def share_out(self, requests: Sequence[Request], *, owed: int = 0) -> Shares:
        """Agree on moves between nodes, and exchange the moved requests. Over the local mains.

        Args:
            owed: unfinished completions of earlier batches in this node's engines, whichever node requested them.
        """
        offer = [request.n for request in requests], owed
        offers = self._groups.all_gather_between_nodes(offer, tuple[list[int], int])
        backlog = [each for _, each in offers]
        self._smoothing = BACKLOG_SMOOTHING if any(backlog) else SMOOTHING
        speeds = self._tokens_per_s if all(self._tokens_per_s) else self._engines
        moves = plan_moves([sizes for sizes, _ in offers], speeds, backlog)
        if not moves:
            return Shares(asked=requests, moves=[], sampled=requests)
        mine = [move for move in moves if move.source == self._node]
        travelling = self._groups.all_gather_between_nodes(
            {move.target: [requests[number] for number in move.requests] for move in mine},
            dict[int, list[Request]],
        )
        gone = {number for move in mine for number in move.requests}
        sampled = [request for number, request in enumerate(requests) if number not in gone]
        for from_node in travelling:
            sampled += from_node.get(self._node, [])
        return Shares(asked=requests, moves=moves, sampled=sampled)

    def bring_back(self, shares: Shares, completions: Completions) -> Completions:
        """Return completions sampled for other nodes, and receive this node's. Over the local mains, after all have
        confirmed complete results.

        Args:
            completions: of `shares.sampled`, in the same order.

        Returns:
            Completions of `shares.asked`, in the same order.
        """
        if not shares.moves:
            return completions
        away = {move.target: move.requests for move in shares.moves if move.source == self._node}
        here = {move.source: len(move.requests) for move in shares.moves if move.target == self._node}
        sizes = [request.n for request in shares.sampled]
        by_request = split_completions(completions, sizes)
        foreign: dict[int, Completions] = {}
        for source in sorted(here, reverse=True):  # they follow this node's own, by source
            foreign[source] = concat_completions(by_request[-here[source] :])
            del by_request[-here[source] :]

        messages = self._groups.exchange_between_nodes(
            {source: part.to_message() for source, part in foreign.items()}, away
        )
        gone = {number for numbers in away.values() for number in numbers}
        kept = [number for number in range(len(shares.asked)) if number not in gone]
        of_request = dict(zip(kept, by_request, strict=True))
        for target, message in messages.items():
            sizes = [shares.asked[number].n for number in away[target]]
            came = split_completions(Completions.from_message(message), sizes)
            of_request.update(zip(away[target], came, strict=True))
        return concat_completions([of_request[number] for number in range(len(shares.asked))])
