"""Which row of the job's batch a node's first one is, on nodes of any sizes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo.groups.agreement import knowing
from grpo.rollout.node import LocalMainSampler
from grpo.rollout.prompts import Prompts
from tests.support.made_up_jobs import job

BASE, ROWS = 1000, 4


def seeds_on(counts: tuple[int, ...], num_generations: int) -> list[tuple[int, int]]:
    """Prompt and seed of each row of the job, with four rows on each rank."""
    found: list[tuple[int, int]] = []
    for main in [topology for topology in knowing(job((0,) * len(counts), counts)) if topology.is_local_main]:
        of_ranks = [
            Prompts.of([[row // num_generations] for row in range(rank * ROWS, (rank + 1) * ROWS)])
            for rank in main.node_ranks
        ]
        messages = [prompts.to_message() for prompts in of_ranks]
        groups: Any = SimpleNamespace(topology=main, gather=lambda mine, messages=messages: messages)
        pool: Any = SimpleNamespace(submit=lambda requests, **how: requests)
        pending = LocalMainSampler(groups, SimpleNamespace(), pool, timeout_s=1.0).submit(of_ranks[0], BASE)  # type: ignore[arg-type]
        assert pending.rows_by_rank == [ROWS] * len(main.node_ranks)
        for request in pending.shares.asked:
            found += [(int(request.token_ids[0]), request.seed + number) for number in range(request.n)]
    return found


@pytest.mark.parametrize("counts", [(2, 1), (1, 3, 2), (7, 6), (3, 3)], ids=str)
@pytest.mark.parametrize("num_generations", [3, 4])  # groups of three lie on two ranks, and on two nodes
def test_row_seeds_on_many_nodes_match_one_node(counts: tuple[int, ...], num_generations: int) -> None:
    rows = np.arange(ROWS * sum(counts))
    by_hand = [(int(row) // num_generations, BASE + int(row)) for row in rows]
    assert seeds_on(counts, num_generations) == by_hand
    assert seeds_on((sum(counts),), num_generations) == by_hand
