"""What of a batch's importance-sampling ratios was clipped or masked."""

import pytest
import torch

from grpo.record.metrics import count_clipped, models_tokens

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])  # 4 completions of 9 tokens


@pytest.mark.parametrize(
    ("mode", "ratio", "counts"),
    [
        ("sequence_mask", [[0.0], [1.2], [0.0], [0.9]], [2, 4]),
        ("sequence_truncate", [[3.0], [1.2], [0.5], [0.9]], [2, 4]),
        ("token_mask", [[0.0, 1, 1], [1, 1, 1], [1, 0.0, 1], [1, 1, 0.0]], [3, 9]),
        ("token_truncate", [[3.0, 0.5, 1], [1, 1, 1], [1, 3.0, 3.0], [1, 1, 1]], [3, 9]),  # one 3.0 is padding
    ],
)
def test_count_clipped_counts_entries_outside_bounds(mode: str, ratio: list[list[float]], counts: list[int]) -> None:
    found = count_clipped(torch.tensor(ratio), MASK, mode=mode, clip_min=0.5, clip_max=3.0)
    assert found.tolist() == counts
    assert count_clipped(torch.ones(4, 1), MASK, mode=mode, clip_min=None, clip_max=None)[0] == 0


def test_count_clipped_summed_over_ranks_stays_within_total() -> None:
    of_ranks = [count_clipped(torch.zeros(4, 1), MASK, mode="sequence_mask", clip_min=None, clip_max=3.0)] * 2
    clipped, total = torch.stack(of_ranks).sum(0).tolist()
    assert (clipped, total) == (8, 8)


def test_models_tokens_exclude_tool_output() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    tools = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    assert models_tokens({"completion_mask": mask}).tolist() == mask.bool().tolist()
    found = models_tokens({"completion_mask": mask, "tool_mask": tools})
    assert found.tolist() == [[True, False, True, False], [False] * 4]
