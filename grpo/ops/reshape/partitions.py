"""How ZeRO deals numbers out to ranks, and how they are found again: pure functions of sizes.

ZeRO-3 cuts every parameter into equal parts, and puts the parts of a sub-group one behind the other; ZeRO-1 and 2 cut a
whole group of parameters (deepspeed 0.19).
"""

import math
from collections.abc import Callable, Sequence

import torch

FLAT_ALIGNMENT = 2
"""Elements: ZeRO-2 makes a flat group a multiple of this times the ranks (`nccl_start_alignment_factor`)."""


def part_size(numel: int, ranks: int) -> int:
    """Elements of a parameter that each rank holds under ZeRO-3, padding included."""
    return math.ceil(numel / ranks)


def sub_groups(names: Sequence[str], sizes: dict[str, int], limit: int, ranks: int) -> list[list[str]]:
    """ZeRO-3's sub-groups of one parameter group, as DeepSpeed's `_create_fp16_sub_groups` forms them.

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
    """Elements `start` to `stop` of a series of which every rank holds a part of `size`: slices, nothing is read."""
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
    """What `rank` of `ranks` gets of a series of `numel` elements, with zeros behind its end.

    Args:
        parts: of the ranks that have held it.
        size_of: `part_size` or `flat_size`, by which it is cut.
    """
    size = size_of(numel, ranks)
    start, stop = min(rank * size, numel), min((rank + 1) * size, numel)
    found = gather(start, stop, size=size_of(numel, len(parts)), parts=parts)
    return torch.cat([*found, parts[0].new_zeros(size - (stop - start))])


def flat_size(numel: int, ranks: int) -> int:
    """Elements of a flat group of ZeRO-2 that each rank holds, padding included."""
    alignment = FLAT_ALIGNMENT * ranks
    return math.ceil(numel / alignment) * alignment // ranks


def flat_padding(numel: int, ranks: int, rank: int) -> int:
    """How many of them are padding."""
    size = flat_size(numel, ranks)
    return min(size, max(0, (rank + 1) * size - numel))
