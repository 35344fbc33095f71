"""Gloo groups for control and completions: the ranks of one node, and the local mains of all nodes.

Data moves over NCCL or shared memory, control over gloo, so that a long generation never sits in a NCCL collective
under its watchdog. All methods are collective over the ranks that they name, in the same order on each.
"""

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo.job.failure import FailureRecord, GenerationDropped, JobFailed
from grpo.job.process_groups import new_gloo_groups
from grpo.job.topology import NodeTopology
from grpo.job.watch import FailureWatch

MARGIN_S = 60.0  # a group outlasts the deadline of the work that its ranks wait for

_instances = itertools.count()


class NodeGroups:
    """The groups of this rank. Every rank of the job makes one, at the same time.

    Args:
        max_wait_s: the longest deadline that any wait on these groups is given.
        watch: is told when the groups cannot be made.

    Raises:
        TimeoutError: ranks did not come to make the groups; names them.
    """

    def __init__(self, topology: NodeTopology, *, max_wait_s: float, watch: FailureWatch | None = None) -> None:
        self.topology = topology
        self._alone = not dist.is_initialized() or topology.world_size == 1
        self._phases = 0
        self._prefix = f"grpo/phases/{next(_instances)}"
        if self._alone:
            return
        size = topology.local_world_size
        nodes = [list(range(node * size, (node + 1) * size)) for node in range(topology.num_nodes)]
        leaders = [ranks[0] for ranks in nodes]
        groups = new_gloo_groups([*nodes, leaders], timeout_s=max_wait_s + MARGIN_S, watch=watch)
        self._node, self._leaders = groups[topology.node], groups[-1]
        self._leader = topology.node * size  # global rank of this node's local main
        self._store = dist.distributed_c10d._get_default_store()

    def all_gather(self, value: Any) -> list[Any]:
        """A small picklable value of every rank of the job, in rank order."""
        if self._alone:
            return [value]
        node_values: list[Any] = [None] * self.topology.local_world_size
        dist.all_gather_object(node_values, value, group=self._node)
        everything: list[Any] = [None]
        if self.topology.is_local_main:
            by_node: list[Any] = [None] * self.topology.num_nodes
            dist.all_gather_object(by_node, node_values, group=self._leaders)
            everything = [[item for values in by_node for item in values]]
        dist.broadcast_object_list(everything, src=self._leader, group=self._node)
        return everything[0]

    def exchange(self, watch: FailureWatch, failure: FailureRecord | None, value: Any = None) -> list[Any]:
        """End a phase together: raise on every rank if it failed on one. Collective over the job.

        Returns:
            The `value` of every rank, in rank order.

        Raises:
            JobFailed: with the record of the first rank that failed, on every rank; or naming the ranks that did not
                answer in time.
            GenerationDropped: instead, on every rank, when a stop had been asked for.
        """
        self._phases += 1
        stop = watch.signals.request
        if failure is not None and watch.stop_was_asked():
            stop = watch.signals.request
        if self._alone:
            if failure is not None:
                raise JobFailed(failure) if stop is None else GenerationDropped(stop.why)
            return [value]
        key = f"{self._prefix}/{self._phases}/"
        self._store.set(f"{key}{self.topology.rank}", "1")
        self._store.delete_key(f"{self._prefix}/{self._phases - 2}/{self.topology.rank}")  # all have left that phase
        if failure is not None and stop is None:
            watch.report(failure)  # ranks that are stuck elsewhere hear of it too
        try:
            answers = self.all_gather((failure, stop, value))
        except RuntimeError as error:
            watch.await_cause()
            watch.check()
            silent = [rank for rank in range(self.topology.world_size) if not self._store.check([f"{key}{rank}"])]
            if not silent:
                raise
            nodes = sorted({rank // self.topology.local_world_size for rank in silent})
            raise JobFailed(
                watch.make_record(f"no answer from ranks {silent} (nodes {nodes}) at the end of this phase: {error}")
            ) from error
        record = next((record for record, _, _ in answers if record is not None), None)
        asked = next((stop for _, stop, _ in answers if stop is not None), None)
        if record is not None:
            raise JobFailed(record) if asked is None else GenerationDropped(asked.why)
        return [answer for _, _, answer in answers]

    # -- inside a node --------------------------------------------------------------------------------------------

    def gather(self, message: np.ndarray) -> list[np.ndarray]:
        """Every rank's message, on the node's local main in local rank order; [] elsewhere. Over the node.

        Args:
            message: [.] int32; the others' may have other lengths.

        Returns:
            Each message with zeros behind it, up to the longest one's length.
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
        """This rank's part of what the node's local main has for each of its ranks. Over the node.

        Args:
            messages: [.] int32 each, in local rank order, on the local main; [] elsewhere.

        Returns:
            The message, with whatever behind it.
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

    def all_gather_between_nodes(self, value: Any) -> list[Any]:
        """A small picklable value of every node, in their order. Over the local mains."""
        by_node: list[Any] = [None] * self.topology.num_nodes
        dist.all_gather_object(by_node, value, group=self._leaders)
        return by_node

    def exchange_between_nodes(
        self, outgoing: dict[int, np.ndarray], sources: Collection[int]
    ) -> dict[int, np.ndarray]:
        """Messages from node to node. Over the local mains, each of which knows which others have one for it.

        Args:
            outgoing: [.] int32, by the node that gets it.
            sources: the nodes that have a message for this one.

        Returns:
            What came, by the node that it came from.
        """
        lengths = {node: torch.tensor([len(message)]) for node, message in outgoing.items()}
        expected = {node: torch.empty(1, dtype=torch.int64) for node in sources}
        self._swap(lengths, expected)
        received = {node: torch.empty(int(length), dtype=torch.int32) for node, length in expected.items()}
        self._swap({node: torch.from_numpy(message) for node, message in outgoing.items()}, received)
        return {node: tensor.numpy() for node, tensor in received.items()}

    def _swap(self, outgoing: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        size = self.topology.local_world_size
        works = [dist.isend(tensor, node * size, group=self._leaders) for node, tensor in outgoing.items()]
        works += [dist.irecv(tensor, node * size, group=self._leaders) for node, tensor in received.items()]
        for work in works:
            if work is not None:  # None: this rank is not in the group
                work.wait()
