"""Start of a node's timeline: its ranks and engines, and its clock offset to node 0."""

import time
from pathlib import Path
from statistics import median

from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.topology import NodeTopology
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import AttemptLine, timeline_path

_READINGS = 5


def open_timeline(
    output_dir: Path, topology: NodeTopology, groups: NodeGroups, watch: FailureWatch, *, attempt: int
) -> Recorder:
    """Return a recorder that writes on a local main, and drops records on other ranks. Collective over the job."""
    offset_s = clock_offset_s(groups, watch)
    if not topology.is_local_main:
        return Recorder()
    begins = AttemptLine(
        attempt=attempt,
        node=topology.node,
        host=topology.host,
        time=round(time.time() - offset_s, 6),
        clock_offset_s=round(offset_s, 6),
        ranks=[*topology.node_ranks],
        rank_devices=list(topology.devices[: topology.local_world_size]),
        engine_devices=[list(engine) for engine in topology.engines],
    )
    return Recorder(timeline_path(output_dir.absolute(), topology.node), begins)


def clock_offset_s(groups: NodeGroups, watch: FailureWatch) -> float:
    """Measure this node's clock minus node 0's: all read their clocks after the same collective. Collective.

    Median of a few readings; the error is the delay of a rank leaving the collective, milliseconds at most.
    """
    topology, readings = groups.topology, []
    for _ in range(_READINGS):
        groups.exchange(watch, None)
        readings.append(time.time())
    everyone: list[list[float]] = groups.exchange(watch, None, readings, list[float])
    own, first = everyone[topology.node_ranks[0]], everyone[0]
    return 0.0 if topology.node == 0 else median(mine - zeros for mine, zeros in zip(own, first, strict=True))
