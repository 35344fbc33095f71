"""All ranks over gloo: what rank 0 decides, what any rank wants, and meeting before going on."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo.job.process_groups import new_gloo_groups
from grpo.job.watch import FailureWatch

T = TypeVar("T")

MEETING_TIMEOUT_S = 1800.0
"""Between the first and the last rank's arrival: the others may be writing a checkpoint to a slow disk."""


class JobGroup:
    """Every rank of the job makes one at the same time; all methods are collective over the job.

    Args:
        watch: is told when the group cannot be made.

    Raises:
        TimeoutError: ranks did not come to make the group; names them.
    """

    def __init__(self, *, timeout_s: float = MEETING_TIMEOUT_S, watch: FailureWatch | None = None) -> None:
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = range(dist.get_world_size())
            (self._group,) = new_gloo_groups([everyone], timeout_s=timeout_s, watch=watch)
        self.rank = dist.get_rank() if self._group is not None else 0

    def largest(self, value: int) -> int:
        """The largest `value` of any rank."""
        if self._group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return int(tensor)

    def meet(self) -> None:
        """Until every rank is here."""
        self.largest(0)

    def by_rank_zero(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0; its picklable value, or the error that it raised, on every rank."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except Exception as problem:  # noqa: BLE001  passed on to every rank, which raises it
                answer[1] = problem
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        value, error = answer
        if error is not None:
            raise error
        return value
