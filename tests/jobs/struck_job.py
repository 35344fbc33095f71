"""Ranks with the job's watch and groups, and no engine, for a test to strike; started by torchrun.

`struck_job.py OUTPUT_DIR TIMEOUT_S HOW`: every rank writes `at-<rank>`, with the pids of itself, its launcher and its
node's sentinel. HOW is

    stuck     the last rank sleeps, and the others are in a collective that waits for it
    finish    all come to their end
    late      rank 2 sleeps before all ranks have met; they write their own pids alone
    absent    rank 1 fails before all ranks have met
    reward    a reward function of rank 1 hangs, with the interpreter's lock
    rewards   those of all ranks do
    behind    the last rank sleeps, and the others are in a collective of torch's, whose own deadline passes
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from grpo.faults.sentinel_start import watch_for
from grpo.groups.agreement import agree_on_topology
from grpo.groups.node_groups import NodeGroups
from grpo.place.topology import read_topology
from grpo.record.timeline.recorder import Recorder

REWARD_S = 2.0
out, timeout_s, how = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", timeout=timedelta(seconds=6 if how == "behind" else 1800))
rank, world_size = dist.get_rank(), dist.get_world_size()
has_reward = how == "rewards" or (how == "reward" and rank == 1)
if has_reward:
    from grpo.rewards.function import RewardFunction  # with TRL: 7 s of a core, which the others are spared


def mark(**pids: int | None) -> None:
    path = out / f"at-{rank}"
    path.with_suffix(".new").write_text(json.dumps({"rank": os.getpid(), "launcher": os.getppid(), **pids}))
    path.with_suffix(".new").rename(path)


def hangs(values: list[int]) -> list[float]:
    ctypes.PyDLL(None).sleep(600)
    return []


def mark_when_it_waits() -> None:
    """From where a SIGTERM is heard, while others are waited for; before, it would end this rank without a word."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.05)
    mark()


if how == "absent" and rank == 1:
    raise KeyError("answer")
if how == "late":
    if rank == 2:
        mark()
        time.sleep(600)
    threading.Thread(target=mark_when_it_waits, daemon=True).start()
topology, pids = agree_on_topology(
    lambda: read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None),
    rank,
    world_size,
    timeout_s=300,
)
local_pids = {each: pids[each] for each in topology.node_ranks}
watch = watch_for(topology, local_pids, timeout_s=timeout_s)
with watch.guard():
    groups = NodeGroups(topology, max_wait_s=600, watch=watch)
    groups.exchange(watch, None)
    with watch.during("train"):
        children = psutil.Process(local_pids[topology.node_ranks[0]]).children()
        mark(sentinel=next(each.pid for each in children if "grpo.faults.sentinel" in each.cmdline()))
        if has_reward:
            RewardFunction(hangs, watch, REWARD_S, Recorder(), beside=False).call_here({"values": [1]})
        if how in ("stuck", "behind") and rank == world_size - 1:
            time.sleep(600)
        if how == "behind":
            dist.all_reduce(torch.ones(1))
        groups.exchange(watch, None)
