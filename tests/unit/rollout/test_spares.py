"""Which groups a batch trains on, and that each row comes to the rank that trains on it, over nodes and ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from grpo.groups.agreement import knowing
from grpo.rollout.packing import pack_completions, to_lists
from grpo.rollout.spares import DealtRows, chosen_groups, deal, flat_groups
from tests.support.made_up_jobs import job

nan = np.nan


@pytest.mark.parametrize(
    ("group", "is_flat"),
    [
        ([[1.0], [1.0], [1.0]], True),
        ([[1.0], [1.0], [0.0]], False),
        ([[0.3], [0.3], [np.nextafter(0.3, 1)]], False),  # a rounded deviation would be 0
        ([[nan], [1.0], [1.0]], True),
        ([[nan], [1.0], [0.0]], False),
        ([[nan], [nan], [nan]], True),
        ([[nan], [nan], [2.0]], True),
        ([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]], False),
        ([[1.0, 2.0], [1.0, 2.0], [1.0, nan]], True),
    ],
)
def test_flat_groups_marks_groups_of_equal_scored_rewards(group: list[list[float]], is_flat: bool) -> None:
    assert flat_groups(np.array([group])).tolist() == [is_flat]


@pytest.mark.parametrize(
    ("is_flat", "chosen"),
    [
        ([0, 0, 0, 0], [0, 1]),
        ([1, 0, 1, 0], [1, 3]),
        ([1, 1, 1, 0], [0, 3]),
        ([1, 1, 1, 1], [0, 1]),
        ([1, 0, 0, 0], [1, 2]),
    ],
)
def test_chosen_groups_takes_spread_first_and_fills_with_flat(is_flat: list[int], chosen: list[int]) -> None:
    assert chosen_groups(np.array(is_flat, bool), 2).tolist() == chosen


class ThreadedGroups:
    """`NodeGroups` of ranks that are threads; messages are padded as theirs are."""

    def __init__(self, topology: Any, board: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.topology, self._board, self._barrier = topology, board, barrier

    def _all(self, key: str, value: Any) -> dict[Any, Any]:
        self._board[key, self.topology.rank] = value
        self._barrier.wait()
        found = {rank: each for (name, rank), each in self._board.items() if name == key}
        self._barrier.wait()
        return found

    def gather(self, message: np.ndarray) -> list[np.ndarray]:
        place, found = self.topology, self._all("gather", message)
        if not place.is_local_main:
            if place.num_nodes > 1:
                self._all("between", {})  # in which the local mains alone take part
            return []
        ranks = place.node_ranks
        longest = max(len(found[rank]) for rank in ranks)
        return [np.concatenate([found[rank], np.zeros(longest - len(found[rank]), np.int32)]) for rank in ranks]

    def exchange_between_nodes(self, outgoing: dict[int, np.ndarray], sources: set[int]) -> dict[int, np.ndarray]:
        found = self._all("between", outgoing)
        mains = {node: ranks[0] for node, ranks in enumerate(self.topology.nodes())}
        sent = {node for node, main in mains.items() if self.topology.node in found[main]}
        assert sent == sources, "each node knows who has rows for it"
        return {source: found[mains[source]][self.topology.node] for source in sources}

    def scatter(self, messages: list[np.ndarray]) -> np.ndarray:
        place = self.topology
        found = self._all("scatter", messages)
        message = found[place.rank - place.local_rank][place.local_rank]
        return np.concatenate([message, np.full(3, 7, np.int32)])


@pytest.mark.parametrize("counts", [(1,), (3,), (1, 1), (2, 2, 2), (2, 1), (1, 3, 2)], ids=str)
def test_deal_sends_each_row_to_its_training_rank(counts: tuple[int, ...]) -> None:
    """With its tokens, log-probabilities, origin and texts, on nodes of any sizes."""
    random = np.random.default_rng(sum(10**node * ranks for node, ranks in enumerate(counts)))
    world, num_rows, share = sum(counts), 5, 3
    tokens = [random.integers(0, 9, size=random.integers(0, 6)).tolist() for _ in range(world * num_rows)]
    logprobs = [[-float(token) for token in row] for row in tokens]
    texts = [f'"{row} ä{"…" * (row % 4)}"' for row in range(world * num_rows)]
    wanted = np.sort(random.choice(world * num_rows, world * share, replace=False))
    board: dict[Any, Any] = {}
    barrier = threading.Barrier(world)

    def rank(topology: Any) -> DealtRows:
        own = range(topology.rank * num_rows, (topology.rank + 1) * num_rows)
        completions = pack_completions(
            [tokens[row] for row in own], [logprobs[row] for row in own], [*own], [1000 + row for row in own]
        )
        mine = DealtRows(completions=completions, texts=[texts[row] for row in own])
        return deal(ThreadedGroups(topology, board, barrier), mine, wanted)  # type: ignore[arg-type]

    places = knowing(job((8,) * len(counts), ranks=counts))
    with ThreadPoolExecutor(world) as threads:
        dealt = list(threads.map(rank, places))
    for number, rows in enumerate(dealt):
        own = wanted[number * share : (number + 1) * share].tolist()
        assert to_lists(rows.completions) == ([tokens[row] for row in own], [logprobs[row] for row in own])
        assert rows.completions.policy_versions.tolist() == own
        assert rows.completions.engines.tolist() == [1000 + row for row in own]
        assert rows.texts == [texts[row] for row in own]
