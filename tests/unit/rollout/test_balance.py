"""The plan of moves by hand and by its properties; requests out and completions back between scripted nodes."""

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo.place.wire import from_json, to_json
from grpo.rollout.balance import BACKLOG_SMOOTHING, TOLERANCE, Move, NodeBalance, plan_moves
from grpo.rollout.packing import Request, pack_completions, to_lists

DEADLINE_S = 20.0


def moves_of(plan: list[Move]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(move.source, move.target, move.requests) for move in plan]


def test_plan_moves_matches_worked_examples() -> None:
    six = [4] * 6
    assert plan_moves([six, six], [1.0, 1.0]) == []
    # 24 s and 12 s -> 20 and 14 -> 16 and 16
    assert moves_of(plan_moves([six, six], [1.0, 2.0])) == [(0, 1, (4, 5))]
    assert moves_of(plan_moves([six, six], [200.0, 100.0])) == [(1, 0, (4, 5))]
    # 24, 8 and 24 s -> 20, 9.3, 24 -> 20, 10.7, 20 -> 16, 12, 20 -> 16, 13.3, 16 -> 12, 14.7, 16 -> one more is no gain
    assert moves_of(plan_moves([six, six, six], [1.0, 3.0, 1.0])) == [(0, 1, (3, 4, 5)), (2, 1, (4, 5))]
    # one request is not cut
    assert plan_moves([[8], [8]], [1.0, 4.0]) == []
    assert plan_moves([[8, 8], [8, 8]], [1.0, 1.9]) == [Move(source=0, target=1, requests=(1,))]
    assert plan_moves([[8, 8], [8, 8]], [1.0, 1.4]) == []  # 16 s against 17.1
    assert plan_moves([[], [4, 4]], [1.0, 1.0]) == [Move(source=1, target=0, requests=(1,))]
    assert plan_moves([[], []], [1.0, 1.0]) == []
    assert plan_moves([[3, 3]], [1.0]) == []


def test_plan_moves_with_backlog_matches_worked_examples() -> None:
    six = [4] * 6
    # 24 + 16 and 24 s -> 36 and 28 -> 32 and 32
    assert moves_of(plan_moves([six, six], [1.0, 1.0], [16, 0])) == [(0, 1, (4, 5))]
    # 24 + 24 and 24 + 48 s at half the speed: the faster one is behind, by 48 to 36 s
    assert moves_of(plan_moves([six, six], [1.0, 2.0], [24, 48])) == [(0, 1, (4, 5))]
    # in proportion to the speeds already
    assert plan_moves([[4] * 3, six], [1.0, 2.0], [12, 24]) == []
    # node 0 keeps one request and is late all the same; the others are levelled without it: 48 and 24 s -> 36 and 36
    late = plan_moves([[4, 4], [4] * 12, six], [1.0, 1.0, 1.0], [400, 0, 0])
    assert moves_of(late) == [(0, 2, (1,)), (1, 2, (10, 11))]
    # without a backlog it is what all wait for, and nothing moves for it
    assert plan_moves([[400], [4] * 12, six], [1.0, 1.0, 1.0]) == []


@pytest.mark.parametrize("trial", range(200))
def test_plan_moves_on_random_loads_moves_each_once_and_ends_no_later(trial: int) -> None:
    rng = np.random.default_rng(trial)
    num_nodes = int(rng.integers(1, 9))
    completions = [rng.integers(1, 9, size=rng.integers(0, 20)).tolist() for _ in range(num_nodes)]
    rates = rng.uniform(0.3, 3.0, size=num_nodes).tolist()
    owed = (rng.integers(0, 2) * rng.integers(0, 200, size=num_nodes)).tolist()
    plan = plan_moves(completions, rates, owed)
    assert plan == plan_moves([list(of_node) for of_node in completions], list(rates), list(owed))
    assert any(owed) or plan == plan_moves(completions, rates)
    moved = [(move.source, number) for move in plan for number in move.requests]
    assert len(moved) == len(set(moved))
    assert len(plan) == len({(move.source, move.target) for move in plan})
    assert not {move.source for move in plan} & {move.target for move in plan}
    before = [late + sum(of_node) for late, of_node in zip(owed, completions, strict=True)]
    after = list(before)
    for move in plan:
        size = sum(completions[move.source][number] for number in move.requests)
        after[move.source] -= size
        after[move.target] += size
        assert after[move.source] > 0  # its speed is to be measured again
    ends_s = [load / rate for load, rate in zip(after, rates, strict=True)]
    last_before_s = max(load / rate for load, rate in zip(before, rates, strict=True))
    assert max(ends_s) <= last_before_s if plan else max(ends_s) == last_before_s
    assert any(owed) or not plan or max(ends_s) < last_before_s
    if not any(owed) and all(len(of_node) > 8 for of_node in completions) and max(rates) < 3 * min(rates):
        largest_s = max(max(of_node) for of_node in completions) / min(rates)
        assert max(ends_s) <= sum(before) / sum(rates) * (1 + TOLERANCE) + largest_s


class Nodes:
    """The groups of several local mains, each in a thread."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.barrier = threading.Barrier(num_nodes, timeout=DEADLINE_S)
        self.values: list[Any] = [None] * num_nodes

    def of(self, node: int) -> Any:
        def gather_json(value: Any, kind: Any) -> list[Any]:
            return [from_json(text, kind) for text in all_gather(to_json(value, kind))]

        def all_gather(value: Any) -> list[Any]:
            self.values[node] = value
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
            return values

        def exchange(outgoing: dict[int, np.ndarray], sources: Collection[int]) -> dict[int, np.ndarray]:
            everything = all_gather(outgoing)
            came = {source: sent[node] for source, sent in enumerate(everything) if node in sent}
            assert came.keys() == set(sources)
            assert all(array.dtype == np.int32 for array in came.values())
            return came

        return SimpleNamespace(
            topology=SimpleNamespace(node=node, num_nodes=self.num_nodes),
            all_gather_between_nodes=gather_json,
            exchange_between_nodes=exchange,
        )


def answer(request: Request, number: int) -> list[int]:
    return [*request.token_ids.tolist(), *range((request.seed + number) % 5)]


@pytest.mark.parametrize("trial", range(20))
def test_node_balance_returns_completions_to_asking_node_and_row(trial: int) -> None:
    rng = np.random.default_rng(trial)
    num_nodes = int(rng.integers(2, 6))
    nodes = Nodes(num_nodes)
    asked = []
    for node in range(num_nodes):
        sizes = rng.integers(1, 5, size=rng.integers(0, 12)).tolist()
        rows = np.cumsum([0, *sizes])
        asked.append(
            [
                Request(token_ids=np.array([node, number], np.int32), n=n, seed=1000 * node + int(row) * trial)
                for number, (row, n) in enumerate(zip(rows, sizes, strict=False))
            ]
        )
    speeds = rng.choice([0.0, 50.0, 100.0, 300.0], size=(2, num_nodes)).tolist()
    owed = [[0] * num_nodes, rng.integers(0, 60, size=num_nodes).tolist()]

    def run(node: int) -> tuple[list[Any], int, Any]:
        balance = NodeBalance(nodes.of(node), [1] * num_nodes)
        plans, num_sampled = [], 0
        for of_nodes, late in zip(speeds, owed, strict=True):
            balance.note(of_nodes)
            shares = balance.share_out(asked[node], owed=late[node])
            plans.append(moves_of(list(shares.moves)))
            num_sampled += sum(request.n for request in shares.sampled)
            rows = [answer(request, number) for request in shares.sampled for number in range(request.n)]
            logprobs = [[-float(token) for token in row] for row in rows]
            sampled = pack_completions(rows, logprobs, [node] * len(rows), [node] * len(rows))
            completions = balance.bring_back(shares, sampled)
        return plans, num_sampled, to_lists(completions)

    with ThreadPoolExecutor(num_nodes) as threads:
        results = list(threads.map(run, range(num_nodes), timeout=DEADLINE_S))
    for node, (plans, _, (rows, logprobs)) in enumerate(results):
        assert plans == results[0][0]
        assert rows == [answer(request, number) for request in asked[node] for number in range(request.n)]
        assert logprobs == [[-float(token) for token in row] for row in rows]
    assert sum(num for _, num, _ in results) == 2 * sum(request.n for of_node in asked for request in of_node)


def test_node_balance_smooths_speeds_and_ignores_zero() -> None:
    nodes = Nodes(1)
    balance = NodeBalance(nodes.of(0), [1])
    balance.note([100.0])
    balance.note([0.0])  # nothing was sampled
    balance.note([200.0])
    assert balance._tokens_per_s == [150.0]
    balance.share_out([], owed=1)  # earlier batches are under way: more of them count
    balance.note([250.0])
    assert balance._tokens_per_s == [150.0 + BACKLOG_SMOOTHING * 100.0]


def test_node_balance_without_speeds_shares_by_engine_count() -> None:
    """Seven ranks and six beside one engine each, then as many ranks beside four engines and five: by hand."""
    groups_of_4 = [14, 12]  # 56 and 48 completions: 56 and 48 -> 52 and 52
    assert plans(groups_of_4, [1, 1]) == [[(0, 1, (13,))]] * 2
    # 40 and 40 completions of 4 and 5 engines: 10 and 8 -> 9 and 8.8 for each engine
    assert plans([10, 10], [4, 5]) == [[(0, 1, (9,))]] * 2


def plans(requests: list[int], engines: list[int]) -> list[list[tuple[int, int, tuple[int, ...]]]]:
    """Of two batches, between which the second node was ten times as fast."""
    nodes = Nodes(2)

    def run(node: int) -> list[Any]:
        balance, plans = NodeBalance(nodes.of(node), engines, by_speed=False), []
        asked = [Request(token_ids=np.array([node], np.int32), n=4, seed=number) for number in range(requests[node])]
        for _ in range(2):
            plans.append(moves_of(list(balance.share_out(asked).moves)))
            balance.note([10.0, 100.0])
        return plans

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2), timeout=DEADLINE_S))
    assert found[0] == found[1]
    return found[0]
