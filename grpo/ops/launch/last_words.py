"""Duties of a node's launcher at its end: informing ranks that wait for its own, and waiting for the head."""

import contextlib
import os
import socket
import time
from datetime import timedelta
from typing import Any

from grpo.faults.deadlines import within
from grpo.ops.launch.agent import Ending
from grpo.ops.launch.line import Rendezvous
from grpo.place.launch import host_name

STORE_S = 10.0
LOOK_S = 2.0
LONGEST_S = 6 * 3600.0  # for a model to be written; later the port may belong to another process


def inform_waiting_ranks(at: Rendezvous, ending: Ending, failed: dict[str, Any] | None) -> None:
    """Free ranks that wait for a failed rank of this node before there is a watch (`agree_on_topology`).

    Returns after `STORE_S` at the latest. Does nothing on the first node: the store has ended with the ranks' launcher.

    Args:
        failed: failure noted by this node's ranks.
    """
    if ending.rank is None or at.node_rank == 0:
        return
    import torch.distributed as dist

    from grpo.faults.failure import FailureKind, FailureRecord
    from grpo.groups.agreement import PHASE, give_up

    failed = failed or {"why": f"rank {ending.rank} has failed: the output of its node says why"}
    record = FailureRecord(
        node=at.node_rank,
        rank=failed.get("rank", ending.rank),
        host=host_name(os.environ),
        phase=PHASE,
        cause=failed["why"],
        kind=failed.get("kind", FailureKind.MACHINE),
    )

    def inform() -> None:
        timeout = timedelta(seconds=STORE_S)
        store = dist.TCPStore(at.head_address, at.port, is_master=False, timeout=timeout, wait_for_workers=False)
        give_up(record, at.processes, store)

    with contextlib.suppress(RuntimeError, OSError):  # the store has ended, and with it the waiting ranks
        within(STORE_S, inform)


def outlast_head(at: Rendezvous, ending: Ending) -> None:
    """Wait until the first node's launcher has ended, if this one's ranks have succeeded.

    Rank 0 may still write a model, for longer than a scheduler lets a job's last node continue alone (`srun --wait`),
    and than torchrun's launchers wait for each other (300 s, torch 2.13).
    """
    if at.node_rank == 0 or not ending.has_succeeded:
        return
    deadline = time.monotonic() + LONGEST_S
    with contextlib.suppress(OSError):  # the job's store has ended
        while time.monotonic() < deadline:
            socket.create_connection((at.head_address, at.port), timeout=STORE_S).close()
            time.sleep(LOOK_S)
