"""Makes the default group of a job on CPUs look as DeepSpeed leaves it on GPUs: bound to a device, ready to be split.

torch then splits the communicator of all ranks on the ranks that are not in a new group. On GPUs that waits for ranks
that never come; here it raises.
"""

import os
from typing import Any

import torch
import torch.distributed as dist


class _Communicator:
    supports_splitting = True

    def perform_nocolor_split(self, device: torch.device) -> None:
        raise AssertionError(f"rank {dist.get_rank()} splits the communicator of all ranks, bound to {device}: a hang")


def bind_default_group() -> torch.device:
    """After `init_process_group`. Returns the device. Where CUDA is there nothing is replaced: the real thing is."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if torch.cuda.is_available():
        return device
    assert hasattr(dist.distributed_c10d, "_get_split_source")  # what torch asks for whom to split
    dist.distributed_c10d._get_split_source = lambda group: _Communicator()
    dist.group.WORLD.bound_device_id = device
    barrier = dist.barrier

    def barrier_on_cpu(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A barrier makes a tensor on the device that its group is bound to, which is not there."""
        group = group or dist.group.WORLD
        bound, group.bound_device_id = group.bound_device_id, None
        try:
            return barrier(group, *args, **kwargs)
        finally:
            group.bound_device_id = bound

    dist.barrier = barrier_on_cpu
    return device
