"""ZeRO's partition of elements over ranks, and its inverse: pure functions of sizes.

ZeRO-3 splits every parameter into equal parts and concatenates the parts of a sub-group; ZeRO-1 and 2 split a whole
parameter group (deepspeed 0.19).
"""

import math
from collections.abc import Callable, Sequence

import torch

FLAT_ALIGNMENT = 2
"""Elements: ZeRO-2 pads a flat group to a multiple of this times the ranks (`nccl_start_alignment_factor`)."""


def part_size(numel: int, ranks: int) -> int:
    """Elements of a parameter on each rank under ZeRO-3, padding included."""
    return math.ceil(numel / ranks)


def sub_groups(names: Sequence[str], sizes: dict[str, int], limit: int, ranks: int) -> list[list[str]]:
    """Form ZeRO-3's sub-groups of one parameter group, as DeepSpeed's `_create_fp16_sub_groups` does.

    Args:
        names: of the group's parameters, in order.
        sizes: elements by name.
        limit: `sub_group_size`, in elements of one rank.
    """
    parts = {name: part_size(sizes[name], ranks) for name in names}
    if limit >= sum(parts.values()):
        return [list(names)]
    groups: list[list[str]] = [[]]
    for name in names:
        groups[-1].append(name)
        if sum(parts[each] for each in groups[-1]) >= limit:
            groups.append([])
    return [group for group in groups if group]


def gather(start: int, stop: int, *, size: int, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Slice elements `start` to `stop` out of a series, partitioned into one part of `size` per rank; reads nothing."""
    found = []
    while start < stop:
        rank, inside = divmod(start, size)
        end = min(stop, (rank + 1) * size)
        found.append(parts[rank][inside : inside + end - start])
        start = end
    return found


def dealt(
    numel: int, rank: int, ranks: int, *, parts: Sequence[torch.Tensor], size_of: Callable[[int, int], int]
) -> torch.Tensor:
    """Return the part of `rank` of `ranks` of a series of `numel` elements, zero-padded.

    Args:
        parts: one per old rank.
        size_of: `part_size` or `flat_size`, the rule of the partition.
    """
    size = size_of(numel, ranks)
    start, stop = min(rank * size, numel), min((rank + 1) * size, numel)
    found = gather(start, stop, size=size_of(numel, len(parts)), parts=parts)
    return torch.cat([*found, parts[0].new_zeros(size - (stop - start))])


def flat_size(numel: int, ranks: int) -> int:
    """Elements of a flat ZeRO-2 group on each rank, padding included."""
    alignment = FLAT_ALIGNMENT * ranks
    return math.ceil(numel / alignment) * alignment // ranks


def flat_padding(numel: int, ranks: int, rank: int) -> int:
    """Padding elements among them."""
    size = flat_size(numel, ranks)
    return min(size, max(0, (rank + 1) * size - numel))
