"""Prompts move from slow nodes to fast ones, so that no node waits for the slowest (`vllm_balance_nodes`); and to nodes
with more engines for each rank, where nodes differ.

Over the local mains. A request travels with its seed, so that a row's completion is the same wherever it is sampled,
and its completions come back to the node that asked. With several batches under way a node's engines still owe
completions of earlier ones when the next is shared out: these count, so that a lastingly slow node gets as many fewer
new ones as it is behind, and its backlog stays in proportion to its speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.groups.node_groups import NodeGroups
from grpo.place.wire import Wire
from grpo.rollout.packing import Completions, Request, concat_completions, split_completions

TOLERANCE = 0.05  # from batch to batch a node's tokens/s differ by more than this; nothing moves for less
SMOOTHING = 0.5  # share of the last batch in a node's tokens/s
BACKLOG_SMOOTHING = 0.25  # the same while earlier batches are under way: they absorb what differs from batch to batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Requests that another node samples."""

    source: int
    """The node that asked."""
    target: int
    """The node that samples."""
    requests: tuple[int, ...]
    """Numbers of the source's requests, ascending."""


def plan_moves(
    completions: Sequence[Sequence[int]], tokens_per_s: Sequence[float], owed: Sequence[int] | None = None
) -> list[Move]:
    """Who sends which requests to whom, so that all nodes are done at about the same time.

    One request after the other goes from the node that would be done last to the one that is then done first, as long
    as that ends earlier; none when the last node is within `TOLERANCE` of the ideal. A node that keeps one request
    alone, and is behind by what it owes, is left aside: the others are levelled without it. A function of its
    arguments: every local main works out the same plan.

    Args:
        completions: of each node, the completions of each of its requests.
        tokens_per_s: of each node, above 0.
        owed: of each node, the completions of earlier batches that its engines have yet to finish, whichever node
            asked for them; None: nothing.

    Returns:
        At most one move for each pair of nodes. A node that gets requests sends none.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer(Wire):
    """What one node has to do."""

    sizes: tuple[int, ...]
    """Completions of each of its new requests."""
    owed: int
    """Completions of earlier batches that its engines have yet to finish."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """What becomes of the requests of a batch, as one node sees it."""

    asked: Sequence[Request]
    """By this node's ranks."""
    moves: Sequence[Move]
    """Of the whole job."""
    sampled: Sequence[Request]
    """By this node's engines: what it kept of its own, then what came, by source."""


class NodeBalance:
    """This node's end of the balance. Only local mains have one; all call the same methods in the same order.

    Args:
        engines: of each node; all are taken to be alike until they have been measured.
        by_speed: whether they are measured. If not, a batch is shared out in the same way whenever it is sampled, by a
            job that is resumed, too.
    """

    def __init__(self, groups: NodeGroups, engines: Sequence[int], *, by_speed: bool = True) -> None:
        self._groups = groups
        self._node = groups.topology.node
        self._engines, self._by_speed = engines, by_speed
        self._tokens_per_s = [0.0] * groups.topology.num_nodes  # not measured yet
        self._smoothing = SMOOTHING

    def note(self, tokens_per_s: Sequence[float]) -> None:
        """What the nodes' engines did in the last batch; the same on every local main. 0: nothing was sampled there."""
        for node, (old, new) in enumerate(zip(self._tokens_per_s, tokens_per_s, strict=True)):
            if new > 0 and self._by_speed:
                self._tokens_per_s[node] = self._smoothing * new + (1 - self._smoothing) * (old or new)

    def share_out(self, requests: Sequence[Request], *, owed: int = 0) -> Shares:
        """Agree on the moves of this node's requests and the others', and exchange what moves. Over the local mains.

        Args:
            owed: completions of earlier batches that this node's engines have yet to finish, whichever node asked.
        """
        offer = _Offer(sizes=tuple(request.n for request in requests), owed=owed)
        offers = self._groups.all_gather_between_nodes(offer, _Offer)
        backlog = [each.owed for each in offers]
        self._smoothing = BACKLOG_SMOOTHING if any(backlog) else SMOOTHING
        speeds = self._tokens_per_s if all(self._tokens_per_s) else self._engines
        moves = plan_moves([each.sizes for each in offers], speeds, backlog)
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
        """Send what was sampled for other nodes to them, and get what they sampled for this one. Over the local mains,
        after all have said that they have everything.

        Args:
            completions: of `shares.sampled`, in that order.

        Returns:
            Those of `shares.asked`, in that order.
        """
        if not shares.moves:
            return completions
        away = {move.target: move.requests for move in shares.moves if move.source == self._node}
        here = {move.source: len(move.requests) for move in shares.moves if move.target == self._node}
        sizes = [request.n for request in shares.sampled]
        by_request = split_completions(completions, sizes)
        foreign: dict[int, Completions] = {}
        for source in sorted(here, reverse=True):  # they came after this node's own, by source
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
