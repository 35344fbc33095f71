"""The watch of a job's rank: its node's sentinel, and this process's end of it."""

import itertools
from collections.abc import Mapping

import torch.distributed as dist

from grpo.faults.liveness import HEARTBEAT_TIMEOUT_S, RANK_STALL_TIMEOUT_S, START_TIMEOUT_S
from grpo.faults.sentinel_start import link_to_sentinel
from grpo.faults.watch import FailureWatch
from grpo.place.topology import NodeTopology

_watches = itertools.count()
_current: FailureWatch | None = None


def watch_for(
    topology: NodeTopology,
    local_pids: Mapping[int, int],
    *,
    timeout_s: float = HEARTBEAT_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    rank_stall_timeout_s: float = RANK_STALL_TIMEOUT_S,
) -> FailureWatch:
    """The watch of this rank; without a process group one that only keeps the record. Collective over the job.

    The watch of a trainer before this one is stopped: a process has one.

    Args:
        local_pids: of each rank on this node, this one's included, by global rank.
        timeout_s: without a word of a node, or with a rank or launcher that is stopped, until the job has failed.
        start_timeout_s: from the first rank's coming to its node's watch to the last one's.
        rank_stall_timeout_s: without progress of a rank for which the others wait, until the job has failed.

    Raises:
        SentinelError: a node's sentinel does not start, or cannot reach the first node's.
    """
    global _current
    if _current is not None:
        _current.stop()
    link = None
    if dist.is_initialized() and topology.world_size > 1:
        store = dist.PrefixStore(f"grpo/watch/{next(_watches)}", dist.distributed_c10d._get_default_store())
        link = link_to_sentinel(
            topology,
            topology.host,
            local_pids,
            store,
            timeout_s=timeout_s,
            join_s=start_timeout_s,
            stall_s=rank_stall_timeout_s,
        )
    _current = FailureWatch(link, node=topology.node, rank=topology.rank, host=topology.host)
    return _current
