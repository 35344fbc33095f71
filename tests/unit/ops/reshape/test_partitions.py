"""How ZeRO deals numbers out, worked out by hand."""

import pytest
import torch

from grpo.ops.reshape.partitions import dealt, flat_padding, flat_size, gather, part_size, sub_groups
from grpo.ops.reshape.zero import reparted


def test_part_size_rounds_up() -> None:
    assert [part_size(7, ranks) for ranks in (1, 2, 3, 8)] == [7, 4, 3, 1]


def test_sub_groups_end_at_size_limit() -> None:
    sizes = {"a": 4, "b": 4, "c": 2, "d": 8}
    assert sub_groups("abcd", sizes, 9, 2) == [["a", "b", "c", "d"]]  # 9 elements of a rank
    assert sub_groups("abcd", sizes, 4, 2) == [["a", "b"], ["c", "d"]]
    assert sub_groups("abcd", sizes, 3, 2) == [["a", "b"], ["c", "d"]]
    assert sub_groups("abcd", sizes, 8, 1) == [["a", "b"], ["c", "d"]]
    assert sub_groups("abc", sizes, 4, 2) == [["a", "b"], ["c"]]
    assert sub_groups([], sizes, 4, 2) == [[]]


def test_flat_size_is_multiple_of_two_per_rank() -> None:
    assert [flat_size(13, ranks) for ranks in (1, 2, 3)] == [14, 8, 6]
    assert [flat_padding(13, 2, rank) for rank in (0, 1)] == [0, 3]
    assert [flat_padding(3, 4, rank) for rank in range(4)] == [0, 1, 2, 2]  # two ranks hold nothing but padding


def test_gather_reads_across_owner_borders() -> None:
    owned = [torch.arange(0, 5), torch.arange(5, 10), torch.arange(10, 15)]
    found = gather(3, 12, size=5, parts=owned)
    assert [part.tolist() for part in found] == [[3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert gather(4, 4, size=5, parts=owned) == []


def test_dealt_beyond_series_pads_with_zeros() -> None:
    owned = [torch.arange(1, 9), torch.arange(9, 14)]  # 13 elements in flat parts of 8; of 6, on three ranks

    def of(rank: int) -> list[int]:
        return dealt(13, rank, 3, parts=owned, size_of=flat_size).tolist()

    assert [of(rank) for rank in range(3)] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4, 9])
def test_reparted_parameter_keeps_values_and_zero_padding(before: int, ranks: int) -> None:
    shape = torch.Size([7])
    series = torch.arange(1, 8)
    padding = torch.zeros(before * part_size(7, before) - 7, dtype=torch.int64)
    parts = list(torch.cat([series, padding]).view(before, -1))
    found = torch.cat([reparted(parts, shape, rank, ranks) for rank in range(ranks)])
    assert found[:7].equal(series)
    assert len(found) == ranks * part_size(7, ranks)
    assert not found[7:].any()
