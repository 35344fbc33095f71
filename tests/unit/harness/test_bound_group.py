"""The stand-in for a group that is bound to a device is for machines without one."""

import pytest
import torch
import torch.distributed as dist

from tests.support.bound_group import bind_default_group


def test_bind_default_group_with_cuda_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would be given a communicator of ours to split, which is a TypeError in every job with DeepSpeed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    before = dist.distributed_c10d._get_split_source, dist.barrier
    assert bind_default_group() == torch.device("cuda", 3)
    assert (dist.distributed_c10d._get_split_source, dist.barrier) == before
