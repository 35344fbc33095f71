"""Finding the slow node: rounds of disjoint pairs of nodes, and what their figures say. Pure functions."""

import statistics
from collections.abc import Mapping

SLOW = 0.7  # of the reference; figures of healthy links vary by a tenth or two
MAX_ROUNDS = 7  # enough partners to tell a slow node from a slow partner, on any number of nodes


Speeds = Mapping[tuple[int, int], float]
"""GB/s by pair of nodes, in each direction, all ranks of a node together, while other pairs did the same; G is 1e9."""


def pair_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which no pair comes twice (the circle method of a tournament).

    With an odd number one node rests in each round. All rounds together hold every pair, unless `MAX_ROUNDS` ends them.
    """
    players: list[int | None] = list(range(num_nodes))
    if num_nodes % 2:
        players.append(None)
    rounds = []
    for _ in range(min(len(players) - 1, MAX_ROUNDS)):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def find_slow(speeds: Speeds) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """The slow nodes with their best figure, and the slow pairs that no slow node explains.

    A node is as fast as its best pair: a healthy node has at least one healthy partner. The reference is the median of
    the nodes' figures, the upper one of two. With two nodes there is one figure and nothing to compare it with.
    """
    nodes = sorted({node for pair in speeds for node in pair})
    best = {node: max(speed for pair, speed in speeds.items() if node in pair) for node in nodes}
    slow = below_reference(best)
    reference = statistics.median_high(best.values()) if best else 0.0
    return slow, {p: s for p, s in speeds.items() if s < SLOW * reference and not slow.keys() & set(p)}


def below_reference(figures: Mapping[int, float]) -> dict[int, float]:
    """Those below `SLOW` of the median, the upper one of two."""
    if not figures:
        return {}
    reference = statistics.median_high(figures.values())
    return {node: figure for node, figure in figures.items() if figure < SLOW * reference}
