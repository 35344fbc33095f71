"""Makes gloo groups of some of the job's ranks: without a hang, within a deadline, and naming who did not come."""

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

STUCK_S = 30.0  # beyond that: whoever waits without a deadline of its own is ended by the watch
REST_S = 5.0  # at exit, for threads that have been given nothing to do any more

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
    """A group for each list of global ranks. Collective over the job: every rank calls it with the same lists.

    Args:
        timeout_s: of each operation on the groups.
        creation_timeout_s: until all ranks have met in the new groups.
        watch: is told when this rank is stuck where no deadline holds.

    Returns:
        The groups, in order; None for those without this rank.

    Raises:
        TimeoutError: names the ranks that did not come.
    """
    arrivals = dist.PrefixStore(
        f"grpo/groups/{next(_creations)}", dist.distributed_c10d._get_default_store().clone()
    )  # a connection of its own: the job's is busy while the groups are made
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

    atexit.unregister(let_gloo_rest)  # once is enough
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
    except RuntimeError as error:  # gloo's, and the store's
        raise TimeoutError(f"{complaint()} ({str(error).splitlines()[0]})") from error
    for group in groups:
        if group is not None:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return groups


def let_gloo_rest() -> None:
    """Until gloo's threads have let go of the last operation's tensors; at exit, while the interpreter is still whole.

    They do so a moment after `wait` has returned, later on a busy machine, and take the GIL for it. If the interpreter
    is taking itself apart by then, the process aborts: a job that has finished would exit with 1 (torch 2.13,
    https://github.com/pytorch/pytorch/issues/190489). Destroying a group ends its threads only where nothing holds it.

    Returns after `REST_S` at the latest: a thread may be in an operation whose peers have gone.
    """
    deadline = time.monotonic() + REST_S
    before, now = None, _gloo_threads()
    while now and time.monotonic() < deadline:
        if now == before and all("sleeping" in state for state in now.values()):
            return
        time.sleep(0.005)  # without the GIL: a thread that waits for it runs, and is not as before
        before, now = now, _gloo_threads()


def _gloo_threads() -> dict[str, str]:
    """State, and how often it began and stopped to run, of each thread that works for a gloo group."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if status["Name"] == _GLOO_THREAD:
                found[task.name] = " ".join(status[key] for key in ("State", *_SWITCHES))
    return found


def join_deepspeed(config: object) -> None:
    """Let DeepSpeed know of the process group, where it is used and transformers has made one without it.

    With `--deepspeed FILE` and no GPU it does (5.17), and DeepSpeed then takes a rank that loads a ZeRO-3 model for the
    only one: "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size".

    Args:
        config: DeepSpeed's, as the training arguments have it; none where it is not used.
    """
    if not config or not dist.is_initialized():
        return
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend())


def make_world_group(backend: str, *, timeout_s: float) -> None:
    """Make the job's process group with a backend that was asked for, through DeepSpeed.

    transformers drops `ddp_backend` beside `--deepspeed FILE` (5.17), and takes the group that is there. `accelerate
    launch` with DeepSpeed in its file needs none of this.
    """
    import deepspeed

    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_s))
