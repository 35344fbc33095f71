"""All ranks over gloo: what rank 0 decides, what any rank wants, and meeting before going on."""

import json
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo.faults.failure import FailureRecord, JobFailed
from grpo.faults.mistakes import record_of
from grpo.faults.watch import FailureWatch
from grpo.groups.process_groups import new_gloo_groups
from grpo.groups.texts import all_gather_texts, broadcast_text
from grpo.place.wire import from_json, to_json

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

    def __init__(self, *, watch: FailureWatch | None = None) -> None:
        self._group: Any = None
        self._watch = watch
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = range(dist.get_world_size())
            (self._group,) = new_gloo_groups([everyone], timeout_s=MEETING_TIMEOUT_S, watch=watch)
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

    def texts(self, text: str) -> list[str]:
        """What each rank says, by rank."""
        return [text] if self._group is None else all_gather_texts(text, self._group)

    def by_rank_zero(self, decide: Callable[[], T], kind: Any = None) -> T:
        """Run `decide` on rank 0; its value on every rank.

        Args:
            kind: the value's type; see `grpo.place.wire.to_json`.

        Raises:
            Exception: on rank 0 what `decide` raised.
            JobFailed: on the other ranks, then, with a record that says it.
        """
        if self._group is None:
            return decide()
        error, answer = None, None
        if self.rank == 0:
            try:
                answer = json.dumps([to_json(decide(), kind), None])
            except Exception as problem:  # noqa: BLE001  passed on to every rank, which raises it
                error, answer = problem, json.dumps([None, self._record_of(problem).as_dict()])
        told, record = json.loads(broadcast_text(answer, 0, self._group))
        if error is not None:
            raise error
        if record is not None:
            raise JobFailed(FailureRecord(**record))
        return from_json(told, kind)

    def _record_of(self, problem: Exception) -> FailureRecord:
        """Rank 0's."""
        if self._watch is not None:
            return self._watch.make_record(problem)
        return record_of(problem, node=0, rank=0, host=socket.gethostname(), phase="start")
