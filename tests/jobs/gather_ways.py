"""Both ways in which shards travel, on real ranks over gloo, into whole parameters."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from grpo.weights.gather import ShardGather


def both_ways() -> int:
    """Raises AssertionError where a rank got other weights, or kept memory. How many gatherings were compared."""
    compared = 0
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    wholes = [torch.randn(size) for size in (10, 7, 33)]  # not divided by 3
    parameters = []
    for whole in wholes:
        padded = torch.zeros(-(-whole.numel() // num_ranks) * num_ranks)
        padded[: whole.numel()] = whole
        parameters.append(SimpleNamespace(ds_tensor=padded.view(num_ranks, -1)[rank].clone()))
    for receivers in ([0], [0, num_ranks - 1]):
        receives = rank in receivers
        for all_gather in (False, True):
            gather = ShardGather(dist.group.WORLD, dtype=torch.bfloat16, receives=receives, all_gather=all_gather)
            spaces = (gather._received, gather._sent)
            for _ in range(2):  # the second takes its memory anew
                places = [torch.empty(whole.numel(), dtype=torch.bfloat16) for whole in wholes] if receives else None
                gather.gather(parameters, places)  # type: ignore[arg-type]
                for place, whole in zip(places or [], wholes, strict=False):
                    assert torch.equal(place, whole.to(torch.bfloat16))
                assert sum(space._memory.numel() for space in spaces) > 0
                gather.release()
                assert sum(space._memory.numel() for space in spaces) == 0
            compared += 1
    return compared
