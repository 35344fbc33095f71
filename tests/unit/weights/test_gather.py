"""How a parameter's shards become the parameter."""

import pytest
import torch

from grpo.weights.gather import put_rows


@pytest.mark.parametrize(("numel", "ranks"), [(12, 3), (10, 3), (7, 4), (2, 3), (1, 1), (5, 1)])
def test_put_rows_joins_shards_without_padding(numel: int, ranks: int) -> None:
    shard = -(-numel // ranks)
    rows = torch.arange(ranks * shard, dtype=torch.float32).view(ranks, shard)
    expected = torch.arange(numel, dtype=torch.bfloat16)
    at_once, one_by_one = torch.full((2, numel), -1, dtype=torch.bfloat16)
    put_rows(at_once, rows, 0)
    for rank in range(ranks):
        put_rows(one_by_one, rows[rank : rank + 1], rank)
    put_rows(one_by_one, rows[:0], 0)  # the ranks before rank 0
    assert torch.equal(at_once, expected)
    assert torch.equal(one_by_one, expected)
