"""Two ranks with the job's watch and groups, and no engine: one of them does not get to the end of a phase.

`torchrun … echo_job.py OUTPUT_DIR RANK PHASE [fails]`: all ranks write `at-<PHASE>-<rank>`, with their pid. Then rank
RANK sleeps, to be killed, or ends the phase with a failure; the others are in the phase's last collective meanwhile.
Who hears of a failure there writes `raised-<rank>`.
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from grpo.engine.client import EngineError
from grpo.faults.failure import JobFailed
from grpo.faults.sentinel_start import watch_for
from grpo.groups.agreement import agree_on_topology
from grpo.groups.node_groups import NodeGroups
from grpo.place.topology import read_topology

out, stricken, phase, *how = sys.argv[1:]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
topology, pids = agree_on_topology(
    lambda: read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None),
    rank,
    world_size,
    timeout_s=120,
)
watch = watch_for(topology, dict(enumerate(pids)))
with watch.guard():
    groups = NodeGroups(topology, max_wait_s=600, watch=watch)
    with watch.during(phase):
        mark = Path(out) / f"at-{phase}-{rank}"
        mark.with_suffix(".new").write_text(str(os.getpid()))
        mark.with_suffix(".new").rename(mark)
        failure = None
        if rank == int(stricken):
            if not how:
                time.sleep(600)
            failure = watch.make_record(EngineError("kv_cache_dtype: no-such-type"))
        try:
            groups.exchange(watch, failure)
        except JobFailed as error:
            (Path(out) / f"raised-{rank}").write_text(f"{type(error).__name__}: {error}")
            raise
