"""A lastingly slow node with several batches under way: simulated steps, shared out by the real `plan_moves`."""

from collections import deque

import numpy as np
import pytest

from grpo.rollout.balance import BACKLOG_SMOOTHING, plan_moves

GROUP = 8  # completions of a request
REQUESTS = 16  # of a node and batch
STEPS, SETTLED = 60, 20
WORST = 1.15  # of the ideal step: tokens owed over the nodes' measured tokens/s
EIGHT = np.random.default_rng(8).uniform(0.4, 1.6, size=8).tolist()


class _Node:
    """Engines that sample their completions in order, so many tokens a second."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.now_s = 0.0
        self.queue: deque[tuple[int, float]] = deque()  # batch and tokens that are left

    def run_to(self, until_s: float) -> None:
        while self.queue and self.now_s < until_s:
            batch, tokens = self.queue.popleft()
            done = min(tokens, (until_s - self.now_s) * self.speed)
            self.now_s += done / self.speed
            if done < tokens:
                self.queue.appendleft((batch, tokens - done))
                break
        self.now_s = until_s

    def end_of(self, batch: int) -> float:
        return self.now_s + sum(tokens for each, tokens in self.queue if each <= batch) / self.speed


def lengths_of(rng: np.random.Generator, requests: int) -> np.ndarray:
    """[requests, GROUP] tokens with a tail; those of one prompt resemble each other."""
    hard = rng.normal(0.0, 0.6, size=(requests, 1))
    return np.minimum(np.exp(5.0 + 0.6 * (hard + rng.normal(0.0, 0.8, size=(requests, GROUP)))), 2000.0)


def steps_of(
    speeds: list[float], ahead: int, seed: int, by: str = "backlog", seems: float = 1.0
) -> tuple[float, float]:
    """(seconds of a settled step, the ideal: tokens of a step over all tokens/s). Training takes no time here."""
    rng = np.random.default_rng(seed)
    nodes = [_Node(speed) for speed in speeds]
    measured = [0.0] * len(nodes)
    tokens: list[float] = []

    def submit(batch: int) -> None:
        asked = [lengths_of(rng, REQUESTS) for _ in nodes]
        tokens.append(float(sum(each.sum() for each in asked)))
        owed = [len(node.queue) for node in nodes]
        known = measured if all(measured) else [1.0] * len(nodes)
        sizes = [[GROUP] * REQUESTS for _ in nodes]
        moves = plan_moves(sizes, known, owed if by == "backlog" else None) if by != "nothing" else []
        gone = {(move.source, number) for move in moves for number in move.requests}
        shares = [[row for row in range(REQUESTS) if (node, row) not in gone] for node in range(len(nodes))]
        sampled = [[*asked[node][rows].ravel()] for node, rows in enumerate(shares)]
        for move in moves:
            sampled[move.target] += [*asked[move.source][list(move.requests)].ravel()]
        assert sum(map(len, sampled)) == GROUP * REQUESTS * len(nodes)
        for node, of_node in zip(nodes, sampled, strict=True):
            node.queue.extend((batch, float(each)) for each in of_node)

    ends_s = []
    now_s = 0.0
    for batch in range(ahead):
        submit(batch)
    for batch in range(STEPS):
        now_s = max(now_s, *(node.end_of(batch) for node in nodes))
        for index, node in enumerate(nodes):
            node.run_to(now_s)
            seen = node.speed * rng.uniform(0.9, 1.1) * (seems if node.speed == min(speeds) else 1.0)
            measured[index] += BACKLOG_SMOOTHING * (seen - measured[index]) if measured[index] else seen
        ends_s.append(now_s)
        submit(batch + ahead)
    ideal_s = float(np.mean(tokens[SETTLED:STEPS])) / sum(speeds)
    return (ends_s[-1] - ends_s[SETTLED - 1]) / (STEPS - SETTLED), ideal_s


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ahead", [2, 4])
@pytest.mark.parametrize("speeds", [[1.0, 0.5], [1.0, 1.0, 0.5, 1.0], EIGHT], ids=["two", "four", "eight"])
def test_plan_moves_with_slow_node_keeps_step_near_ideal(speeds: list[float], ahead: int, seed: int) -> None:
    step_s, ideal_s = steps_of(speeds, ahead, seed)
    assert step_s <= WORST * ideal_s


@pytest.mark.parametrize("ahead", [2, 4])
def test_plan_moves_with_backlog_corrects_wrong_speeds(ahead: int) -> None:
    """The slow node seems 1.4 times as fast as it is: it gets too much, falls behind, and then gets less."""
    step_s, ideal_s = steps_of([1.0, 0.5], ahead, 0, seems=1.4)
    assert step_s <= WORST * ideal_s
    by_speed_s, ideal_s = steps_of([1.0, 0.5], ahead, 0, by="speed", seems=1.4)
    assert by_speed_s > WORST * ideal_s


def test_steps_without_balance_wait_for_slow_node() -> None:
    step_s, ideal_s = steps_of([1.0, 0.5], 4, 0, by="nothing")
    assert step_s > 1.4 * ideal_s
