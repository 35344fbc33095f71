"""Every group of a job, made while the default group looks as it does on GPUs; started by torchrun.

`python group_job.py OUTPUT_FOLDER`: writes `<rank>.json`, then fails to make groups: first because rank 1 comes late,
then because it never gets out of torch.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from grpo.faults import deadlines
from grpo.faults.failure import JobFailed
from grpo.faults.sentinel_start import watch_for
from grpo.groups import process_groups
from grpo.groups.agreement import agree_on_topology
from grpo.groups.node_groups import NodeGroups
from grpo.groups.process_groups import new_gloo_groups
from grpo.place.topology import read_topology
from tests.support.bound_group import bind_default_group

out = Path(sys.argv[1])
dist.init_process_group("gloo")
device = bind_default_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
topology, pids = agree_on_topology(
    lambda: read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None),
    rank,
    world_size,
    timeout_s=120,
)
watch = watch_for(topology, {rank: pids[rank] for rank in topology.node_ranks})
with watch.guard():
    groups = NodeGroups(topology, max_wait_s=100, watch=watch)
    found = {
        "largest": groups.largest(rank),
        "gathered": groups.all_gather(str(rank)),
        "exchanged": groups.exchange(watch, None, rank * 10, int),
        "decided": groups.by_rank_zero(lambda: (rank + 7, [rank, None]), tuple[int, list[int | None]]),
        "bound": dist.group.WORLD.bound_device_id == device,
    }

    def refuse() -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")  # pickle cannot carry every error

    try:
        groups.by_rank_zero(refuse)
    except (UnicodeDecodeError, JobFailed) as error:
        found["refused"] = [type(error).__name__, str(error)]
    try:
        dist.new_group([0])  # the trap is set
        found["sprung"] = False
    except AssertionError:
        found["sprung"] = True

    store = dist.distributed_c10d._get_default_store()
    deadlines.REMINDER_S = 0.5
    late = "nothing raised"
    if rank != 1:
        try:
            new_gloo_groups([range(world_size)], timeout_s=60, creation_timeout_s=2.0, watch=watch)
        except TimeoutError as error:
            late = str(error)
        found["late"] = late
    (out / f"{rank}.json").write_text(json.dumps(found))
    store.set(f"written/{rank}", "1")
    store.wait([f"written/{other}" for other in range(world_size)], timedelta(seconds=120))

    process_groups.STUCK_S = 1.0
    if rank == 1:
        dist.new_group = lambda *args, **kwargs: time.sleep(600)
        new_gloo_groups([range(world_size)], timeout_s=60, creation_timeout_s=1.0, watch=watch)
    time.sleep(600)  # until the watch has the record
