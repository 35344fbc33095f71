"""Gloo groups for control and completions: the ranks of one node, and the local mains of all nodes.

Collectives over the whole job use both; one group of all ranks would connect every pair of ranks.

Data uses NCCL or shared memory, control uses gloo, so that a long generation never waits in an NCCL collective under
its watchdog. All methods are collective over the ranks they name, in the same order on each.
"""

import json
import logging
import os
from bisect import bisect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from grpo.faults.failure import FailureRecord, GenerationDropped, JobFailed
from grpo.faults.kinds import record_of
from grpo.faults.liveness import START_TIMEOUT_S
from grpo.faults.signals import StopRequest
from grpo.faults.watch import FailureWatch
from grpo.groups.process_groups import new_gloo_groups
from grpo.place.launch import Launch, host_name
from grpo.place.wire import Wire, from_json, to_json

T = TypeVar("T")

_log = logging.getLogger(__name__)

MARGIN_S = 60.0  # added to the deadline of the work that a group's ranks wait for
GROUP_TIMEOUT_S = 1800.0
"""Limit between the first and the last rank's arrival: the others may be writing a checkpoint to a slow disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer(Wire):
    """Answer of one rank at the end of a phase."""

    failure: FailureRecord | None
    stop: StopRequest | None
    value: str
    """JSON text."""


class NodeGroups:
    """Groups of this rank. Every rank of the job creates them at the same time.

    Args:
        max_wait_s: longest deadline of any wait on these groups; `GROUP_TIMEOUT_S` at least.
        start_timeout_s: limit until all ranks have joined the groups.
        watch: reports a failure to create the groups.

    Raises:
        TimeoutError: ranks did not join; names them.
    """

    def __init__(
        self,
        topology: Launch,
        *,
        max_wait_s: float = 0.0,
        start_timeout_s: float = START_TIMEOUT_S,
        watch: FailureWatch | None = None,
    ) -> None:
        self.topology = topology
        self._watch = watch
        nodes = topology.nodes()
        self._mains = [ranks[0] for ranks in nodes]
        self._alone = not dist.is_initialized() or topology.world_size == 1
        if self._alone:
            return
        timeout_s = max(max_wait_s, GROUP_TIMEOUT_S) + MARGIN_S
        groups = new_gloo_groups(
            [*map(list, nodes), self._mains], timeout_s=timeout_s, creation_timeout_s=start_timeout_s, watch=watch
        )
        self._node, self._leaders = groups[topology.node], groups[-1]
        self._leader = self._mains[topology.node]

    def all_gather(self, text: str) -> list[str]:
        """Gather a short text from every rank of the job, in rank order."""
        if self._alone:
            return [text]
        of_node = json.dumps(all_gather_texts(text, self._node))
        everything = None
        if self.topology.is_local_main:
            nodes = all_gather_texts(of_node, self._leaders)
            everything = json.dumps([each for node in nodes for each in json.loads(node)])
        return json.loads(broadcast_text(everything, self._leader, self._node))

    def largest(self, value: int) -> int:
        """Maximum of `value` over all ranks of the job."""
        if self._alone:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        for group in (self._node, self._leaders, self._node):
            if group is not None:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        return int(tensor)

    def meet(self) -> None:
        """Barrier over all ranks of the job."""
        self.largest(0)

    def by_rank_zero(self, decide: Callable[[], T], kind: Any = None) -> T:
        """Run `decide` on rank 0, and return its value on every rank of the job.

        Args:
            kind: the value's type; see `grpo.place.wire.to_json`.

        Raises:
            Exception: on rank 0, raised by `decide`.
            JobFailed: on the other ranks, with the record of the failure.
        """
        if self._alone:
            return decide()
        error, answer = None, None
        if self.topology.rank == 0:
            try:
                answer = json.dumps([to_json(decide(), kind), None])
            except Exception as problem:  # noqa: BLE001  passed on to every rank, which raises it
                record = (
                    self._watch.make_record(problem)
                    if self._watch is not None
                    else record_of(problem, node=0, rank=0, host=host_name(os.environ), phase="start")
                )
                error, answer = problem, json.dumps([None, record.as_dict()])
        if self._leaders is not None:
            answer = broadcast_text(answer, 0, self._leaders)
        decision, failed = json.loads(broadcast_text(answer, self._leader, self._node))
        if error is not None:
            raise error
        if failed is not None:
            raise JobFailed(FailureRecord(**failed))
        return from_json(decision, kind)

    def exchange(
        self, watch: FailureWatch, failure: FailureRecord | None, value: Any = None, kind: Any = None
    ) -> list[Any]:
        """End a phase together: raise on every rank if it failed on one. Collective over the job.

        Args:
            value: a small value of this rank.
            kind: its type, the same on every rank, `| None` if some have none; see `grpo.place.wire.to_json`.

        Returns:
            The `value` of every rank, in rank order.

        Raises:
            JobFailed: on every rank, with the record of the first rank that failed, or the ranks that did not answer in
                time.
            GenerationDropped: instead, on every rank, if a stop was requested.
        """
        stop = watch.signals.request
        if failure is not None and watch.stop_was_asked():
            stop = watch.signals.request
        if self._alone:
            if failure is not None:
                raise JobFailed(failure) if stop is None else GenerationDropped(stop.why)
            return [from_json(to_json(value, kind), kind)]  # as other ranks would receive it
        exchange = watch.note_exchange()
        # Before the report, whose record interrupts this thread: pydantic would wrap that into an error of its own.
        answer = _Answer(failure=failure, stop=stop, value=to_json(value, kind)).dumps()
        if failure is not None and stop is None:
            watch.report(failure)  # ranks that are stuck elsewhere get it too
        try:
            answers = [_Answer.loads(text) for text in self.all_gather(answer)]
        except RuntimeError as error:
            watch.await_cause()
            watch.check()
            silent = watch.not_come(exchange)
            if not silent:
                raise
            who = ", ".join(
                f"{rank} (node {bisect(self._mains, rank) - 1}, in phase '{phase}')"
                for rank, phase in sorted(silent.items())
            )
            raise JobFailed(
                watch.make_record(f"no answer from ranks {who} at the end of this phase [GRPO-610]: {error}")
            ) from error
        record = next((answer.failure for answer in answers if answer.failure is not None), None)
        asked = next((answer.stop for answer in answers if answer.stop is not None), None)
        if record is not None:
            raise JobFailed(record) if asked is None else GenerationDropped(asked.why)
        _log.debug("exchange %d: all %d ranks have ended phase '%s'", exchange, len(answers), watch.phase)
        return [from_json(answer.value, kind) for answer in answers]

    # -- inside a node --------------------------------------------------------------------------------------------

    def gather(self, message: np.ndarray) -> list[np.ndarray]:
        """Gather every rank's message on the node's local main, in local rank order; [] elsewhere. Over the node.

        Args:
            message: [.] int32; lengths may differ between ranks.

        Returns:
            Each message, padded with zeros to the longest one's length.
        """
        if self._alone:
            return [message]
        longest = torch.tensor([len(message)])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._node)
        padded = torch.zeros(int(longest), dtype=torch.int32)
        padded[: len(message)] = torch.from_numpy(message)
        count = self.topology.local_world_size if self.topology.is_local_main else 0
        receive = [torch.empty_like(padded) for _ in range(count)]
        dist.gather(padded, receive or None, dst=self._leader, group=self._node)
        return [part.numpy() for part in receive]

    def scatter(self, messages: list[np.ndarray]) -> np.ndarray:
        """Send one message from the node's local main to each of its ranks. Over the node.

        Args:
            messages: [.] int32 each, in local rank order, on the local main; [] elsewhere.

        Returns:
            This rank's message, followed by arbitrary padding.
        """
        if self._alone:
            return messages[0]
        longest = torch.tensor([max(map(len, messages), default=0)])
        dist.broadcast(longest, src=self._leader, group=self._node)
        received = torch.empty(int(longest), dtype=torch.int32)
        parts = [torch.empty_like(received) for _ in messages]
        for part, message in zip(parts, messages, strict=True):
            part[: len(message)] = torch.from_numpy(message)
        dist.scatter(received, parts or None, src=self._leader, group=self._node)
        return received.numpy()

    # -- between local mains --------------------------------------------------------------------------------------

    def all_gather_between_nodes(self, value: Any, kind: Any) -> list[Any]:
        """Gather a small value of every node, in node order. Over the local mains.

        Args:
            kind: its type; see `grpo.place.wire.to_json`.
        """
        return [from_json(text, kind) for text in all_gather_texts(to_json(value, kind), self._leaders)]

    def exchange_between_nodes(
        self, outgoing: dict[int, np.ndarray], sources: Collection[int]
    ) -> dict[int, np.ndarray]:
        """Send messages between nodes. Over the local mains; each knows which others send to it.

        Args:
            outgoing: [.] int32, by receiving node.
            sources: nodes sending to this one.

        Returns:
            Received messages, by sending node.
        """
        lengths = {node: torch.tensor([len(message)]) for node, message in outgoing.items()}
        expected = {node: torch.empty(1, dtype=torch.int64) for node in sources}
        self._swap(lengths, expected)
        received = {node: torch.empty(int(length), dtype=torch.int32) for node, length in expected.items()}
        self._swap({node: torch.from_numpy(message) for node, message in outgoing.items()}, received)
        return {node: tensor.numpy() for node, tensor in received.items()}

    def _swap(self, outgoing: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        works = [dist.isend(tensor, self._mains[node], group=self._leaders) for node, tensor in outgoing.items()]
        works += [dist.irecv(tensor, self._mains[node], group=self._leaders) for node, tensor in received.items()]
        for work in works:
            if work is not None:  # None: this rank is not in the group
                work.wait()


def as_one_node(launch: Launch) -> Launch:
    """Return the job as if all its ranks were on one node; without engines their placement does not matter."""
    return replace(launch, node=0, num_nodes=1, local_rank=launch.rank, local_world_size=launch.world_size)


def all_gather_texts(text: str, group: Any) -> list[str]:
    """Gather a text from every rank of `group`, in order. Collective over the group."""
    mine = _to_tensor(text)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [_to_text(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]


def broadcast_text(text: str | None, source: int, group: Any) -> str:
    """Broadcast global rank `source`'s text to every rank of `group`. Collective over the group.

    Args:
        text: None on the other ranks.
    """
    mine = None if text is None else _to_tensor(text)
    length = torch.tensor([0 if mine is None else len(mine)])
    dist.broadcast(length, src=source, group=group)
    message = torch.empty(int(length), dtype=torch.uint8) if mine is None else mine
    dist.broadcast(message, src=source, group=group)
    return _to_text(message)


def _to_tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(text.encode()), dtype=np.uint8))


def _to_text(data: torch.Tensor) -> str:
    return data.numpy().tobytes().decode()
