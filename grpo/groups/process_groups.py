"""Creation of gloo groups of some of the job's ranks: no hang, a deadline, and the names of missing ranks."""

import atexit
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from grpo.faults.deadlines import every_minute
from grpo.faults.watch import FailureWatch
from grpo.groups.agreement import missing_ranks
from grpo.place.patches.torch import unbound_default_group

_log = logging.getLogger(__name__)

STUCK_S = 30.0  # slack beyond that: the watch then ends a wait without a deadline of its own
REST_S = 5.0  # at exit, for idle threads to settle

_GLOO_THREAD = "pt_gloo_runloop"
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_creations = itertools.count()


def new_gloo_groups(
    memberships: Sequence[Sequence[int]],
    *,
    timeout_s: float,
    creation_timeout_s: float,
    watch: FailureWatch | None = None,
) -> list[dist.ProcessGroup | None]:
    """Make a gloo group for each list of global ranks. Collective over the job: every rank passes the same lists.

    Args:
        timeout_s: of each operation on the groups.
        creation_timeout_s: limit until all ranks have joined the new groups.
        watch: reports a rank stuck without a deadline.

    Returns:
        The groups, in order; None for those without this rank.

    Raises:
        TimeoutError: names the missing ranks.
    """
    arrivals = dist.PrefixStore(
        f"grpo/groups/{next(_creations)}", dist.distributed_c10d._get_default_store().clone()
    )  # a separate connection: the job's is busy while the groups are made
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def name_missing(seconds: float) -> None:
        if missing := missing_ranks(arrivals, world_size):
            phases = {} if watch is None else watch.not_come(sys.maxsize)
            what = ", ".join(f"{other} ({phases.get(other, 'before its first phase')})" for other in missing)
            _log.warning("for %.0f s the process groups have waited for ranks %s", seconds, what)

    def complaint() -> str:
        missing = missing_ranks(arrivals, world_size)
        why = (
            f"ranks {missing} did not come"
            if missing
            else "all ranks came, but cannot connect: look at GLOO_SOCKET_IFNAME and at the firewall between the nodes"
        )
        return f"the process groups were not made within {creation_timeout_s:.0f} s [GRPO-307]: {why}"

    atexit.unregister(let_gloo_rest)  # register once
    atexit.register(let_gloo_rest)
    arrivals.set(f"rank{rank}", "here")
    groups: list[dist.ProcessGroup | None] = []
    try:
        with contextlib.ExitStack() as around:
            around.enter_context(unbound_default_group())
            if rank == 0:
                around.enter_context(every_minute(name_missing))
            if watch is not None:
                around.enter_context(watch.during("process groups"))
                around.enter_context(watch.within(creation_timeout_s + STUCK_S, complaint))
            for ranks in memberships:
                group = dist.new_group(list(ranks), timeout=timedelta(seconds=creation_timeout_s), backend="gloo")
                groups.append(group if rank in ranks else None)
    except RuntimeError as error:  # raised by gloo and by the store
        raise TimeoutError(f"{complaint()} ({str(error).splitlines()[0]})") from error
    for group in groups:
        if group is not None:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return groups


def let_gloo_rest() -> None:
    """Wait until gloo's threads have released the tensors of the last operation; runs at exit, before the interpreter's
    shutdown.

    They do so a moment after `wait` has returned, later on a busy machine, and take the GIL for it. During interpreter
    shutdown that aborts the process: a finished job would exit with 1 (torch 2.13,
    https://github.com/pytorch/pytorch/issues/190489). Destroying a group ends its threads only if nothing else refers
    to it.

    Returns after `REST_S` at the latest: a thread may be in an operation with lost peers.
    """
    deadline = time.monotonic() + REST_S
    before, now = None, _gloo_threads()
    while now and time.monotonic() < deadline:
        if now == before and all("sleeping" in state for state in now.values()):
            return
        time.sleep(0.005)  # releases the GIL: a thread waiting for it runs, and its counters change
        before, now = now, _gloo_threads()


def _gloo_threads() -> dict[str, str]:
    """State and context switches of each thread of a gloo group, by thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if status["Name"] == _GLOO_THREAD:
                found[task.name] = " ".join(status[key] for key in ("State", *_SWITCHES))
    return found


def join_deepspeed(config: object) -> None:
    """Register the process group with DeepSpeed, if it is used and transformers has made the group without it.

    This happens with `--deepspeed FILE` and no GPU (5.17). DeepSpeed then takes a rank that loads a ZeRO-3 model for
    the only one: "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size".

    Args:
        config: DeepSpeed's, from the training arguments; None without DeepSpeed.
    """
    if not config or not dist.is_initialized():
        return
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend())


def make_world_group(backend: str, *, timeout_s: float) -> None:
    """Make the job's process group with the requested backend, through DeepSpeed.

    With `--deepspeed FILE` transformers drops `ddp_backend` (5.17), and uses an existing group. `accelerate launch`
    with DeepSpeed in its file needs none of this.
    """
    import deepspeed

    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_s))
