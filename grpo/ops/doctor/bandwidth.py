"""Bandwidth between nodes: the doctor's second stage, started by the launcher of the training job.

    accelerate launch --config_file configs/4node.yaml ... -m grpo.ops.doctor.bandwidth --params-b 7.6
    torchrun --nproc_per_node 7 ... -m grpo.ops.doctor.bandwidth

So it has training's ranks, devices and backend. It tries the job's number formats, measures inside each node, over all
ranks, and in rounds of disjoint pairs of nodes, which identify a slow one. It has its own deadline.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from grpo.faults.deadlines import on_expiry
from grpo.faults.liveness import HEARTBEAT_TIMEOUT_S
from grpo.faults.sentinel_start import link_to_sentinel
from grpo.faults.watch import FailureWatch
from grpo.ops.doctor.bandwidth_verdict import DTYPES, RankResult, explain_failure, judge_bandwidth, partners_of
from grpo.ops.doctor.table import show
from grpo.ops.rendezvous.addresses import read_interfaces, route_to
from grpo.place.files import add_job_arguments, wishes_of
from grpo.place.launch import Launch, read_launch

MB = 10**6
WARM_UPS, REPEATS = 2, 5
PAIR_BYTES = 64 * MB  # at most, from each rank
_BYTES_PER_PARAMETER = 2  # bfloat16, the usual dtype of weight syncs
_MARGIN_S = 60.0  # a collective outlasts the stage's deadline, so that the watch ends it and names the missing ranks


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grpo.ops.doctor.bandwidth", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), help="as in training; default: nccl with GPUs, else gloo"
    )
    parser.add_argument("--size-mb", type=int, help="of each collective's result; default: 256, and 16 with gloo")
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS", help="default: %(default).0f")
    parser.add_argument(
        "--params-b", type=float, help="1e9 parameters of the model, to estimate the seconds of a weight sync"
    )
    add_job_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    args = parser.parse_args(argv)
    try:
        args.job = wishes_of(args)
    except ValueError as error:
        parser.error(str(error))
    args.on_gpus = torch.cuda.is_available() and not (args.job is not None and args.job.use_cpu)
    wished = None if args.job is None else args.job.backend
    args.backend = args.backend or wished or ("nccl" if args.on_gpus else "gloo")
    args.size_mb = args.size_mb or (256 if args.backend == "nccl" else 16)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank's part. Returns the same code on every rank: 0, 1 on any FAIL, 2 for a wrong start."""
    args = parse_arguments(argv)
    try:
        launch = read_launch(os.environ)
        if launch.world_size == 1:
            raise ValueError("one rank has nobody to exchange with: start this with the launcher that starts training")
    except ValueError as error:
        print(f"grpo.ops.doctor.bandwidth: {error}", file=sys.stderr)
        return 2
    patience = timedelta(seconds=args.deadline + _MARGIN_S)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    try:
        stages = Stages(store, launch, args)
    except (RuntimeError, OSError) as error:  # missing ranks, or an unreachable node
        print(f"grpo.ops.doctor.bandwidth: {error}", file=sys.stderr)
        return 1
    try:
        with stages.watch.guard(), on_expiry(args.deadline, stages.expire):
            dist.init_process_group(
                args.backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=patience
            )
            result = measure(stages.launch, args, stages, patience)
            dist.destroy_process_group()
            code = collect(result, launch, args, stages, dist.PrefixStore("grpo/doctor", store))
    except (RuntimeError, OSError) as error:  # torch's distributed errors and `JobFailed` are RuntimeErrors
        stages.fail(error)
        return 1
    stages.watch.stop()
    return code


def collect(result: RankResult, launch: Launch, args: argparse.Namespace, stages: "Stages", store: dist.Store) -> int:
    """Judge all ranks' measurements on rank 0, and show the verdict. Collective over the job; returns every rank's exit
    code."""
    stages.enter("collecting the results")
    store.set(f"result/{launch.rank}", result.dumps())
    if launch.rank == 0:
        verdict = judge_bandwidth(
            [RankResult.loads(store.get(f"result/{rank}")) for rank in range(launch.world_size)],
            backend=args.backend,
            num_bytes=result_bytes(args, launch),
            pair_bytes=pair_bytes(args),
            model_bytes=args.params_b and round(args.params_b * 1e9 * _BYTES_PER_PARAMETER),
            device="GPUs" if args.on_gpus else "CPUs",
            job_dtypes=None if args.job is None else args.job.dtypes,
        )
        show(verdict, as_json=args.json)
        store.set("exit code", str(verdict.exit_code))
    return int(store.get("exit code"))


class Stages:
    """Stages of the measurement on this rank, and its end: all ranks enter the same stages in the same order.

    A failure of any rank, or a missed deadline, is shown once, with the stage and the nodes that did not reach it. The
    job's failure watch then ends every rank, whatever it is stuck in.
    """

    def __init__(self, store: dist.Store, launch: Launch, args: argparse.Namespace) -> None:
        self._args, self._host = args, socket.gethostname()
        self._store = dist.PrefixStore("grpo/doctor", store.clone())  # `store` may be blocked in a wait when we fail
        self._entered = -1
        self._store.set(f"pid/{launch.rank}", str(os.getpid()))
        link = link_to_sentinel(
            launch,
            self._host,
            {rank: int(self._store.get(f"pid/{rank}")) for rank in launch.node_ranks},
            dist.PrefixStore("grpo/doctor/sentinels", store),
            timeout_s=HEARTBEAT_TIMEOUT_S,
            join_s=args.deadline + _MARGIN_S,
        )
        self.watch = FailureWatch(link, node=launch.node, rank=launch.rank, host=self._host)
        self.launch = launch
        self.enter("start")
        self._store.set(f"ranks/{launch.node}", str(launch.local_world_size))
        counts = [int(self._store.get(f"ranks/{node}")) for node in range(launch.num_nodes)]
        self.launch = replace(launch, ranks_by_node=tuple(counts))

    def enter(self, stage: str) -> None:
        """Begin `stage` on this rank."""
        self._entered += 1
        self.watch.enter(stage)
        self._store.set(f"at/{self.launch.rank}", json.dumps([self._entered, stage, self._host]))

    def expire(self) -> None:
        """End the measurement at the deadline. Called in a thread, on every unfinished rank."""
        try:
            stage, late = self._furthest()
            what = f"no end within {self._args.deadline:.0f} s"
            self._show(stage, what, late)
            self.watch.report(self.watch.make_record(f"{what}; not there: {', '.join(late) or 'nobody'}", stage))
        except (dist.DistError, RuntimeError):
            return  # the store went with its launcher: another rank has reported

    def fail(self, error: Exception) -> None:
        """Report this rank's failure; `watch.guard` has informed the others."""
        if self.watch.record is not None and self.watch.record.rank == self.launch.rank:
            with contextlib.suppress(dist.DistError, RuntimeError):
                what = f"rank {self.launch.rank} on {self._host}: {_first_line(error)}"
                self._show(self.watch.phase, what, [])

    def _furthest(self) -> tuple[str, list[str]]:
        """Return the last stage any rank has entered, and the nodes of ranks that did not reach it."""
        last, stage = -1, "start"
        reached: dict[int, int] = {}  # of the slowest rank of each node
        hosts: dict[int, str] = {}
        places = [(node, rank) for node, ranks in enumerate(self.launch.nodes()) for rank in ranks]
        for node, rank in places:
            number = -1
            if self._store.check([f"at/{rank}"]):
                number, entered, hosts[node] = json.loads(self._store.get(f"at/{rank}"))
                last, stage = max((last, stage), (number, entered))
            reached[node] = min(number, reached.get(node, number))
        late = [node for node, number in reached.items() if number < last]
        return stage, [f"node {node} ({hosts[node]})" if node in hosts else f"node {node}" for node in late]

    def _show(self, stage: str, what: str, late: Sequence[str]) -> None:
        """Show the failure on the first rank that asks: copies from other ranks would break the table."""
        if self._store.add("reporters", 1) > 1:
            return
        interface = _route_to_another_node(self.launch, self._store)
        single = self.launch.num_nodes == 1
        failure = explain_failure(stage, what, late, self._args.backend, route_interface=interface, is_one_node=single)
        show(failure, as_json=self._args.json)


def _route_to_another_node(launch: Launch, store: dist.Store) -> str:
    """Interface from this node to the first one, or from the first to the last; '' if unknown."""
    partner = 0 if launch.node else launch.nodes()[-1][0]
    if not store.check([f"at/{partner}"]):
        return ""  # it never came
    return route_to(json.loads(store.get(f"at/{partner}"))[2], read_interfaces())[0]


def _gpu(launch: Launch) -> torch.device:
    """Device of this rank's weights and gradients, with either backend: its local rank's GPU."""
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


# -- measuring ----------------------------------------------------------------------------------------------------


def result_bytes(args: argparse.Namespace, launch: Launch) -> int:
    """Bytes of a collective on each rank: float32, a multiple of the world size."""
    unit = 4 * launch.world_size
    return -(-args.size_mb * MB // unit) * unit


def pair_bytes(args: argparse.Namespace) -> int:
    """Bytes each rank sends to its partner."""
    return min(args.size_mb * MB, PAIR_BYTES)


def measure(launch: Launch, args: argparse.Namespace, stages: Stages, patience: timedelta) -> RankResult:
    """Try number formats, and measure seconds inside this rank's node, over all ranks, and with each partner.
    Collective over the job: the same stages in the same order on every rank."""
    device = _gpu(launch) if args.backend == "nccl" else torch.device("cpu")  # gloo is measured in host memory
    training_device = _gpu(launch) if args.on_gpus else torch.device("cpu")
    nodes, whole = [*map(list, launch.nodes())], torch.ones(result_bytes(args, launch) // 4, device=device)
    inside: dict[str, float] = {}
    across: dict[str, float] = {}
    pairs: tuple[tuple[int, float], ...] = ()
    stages.enter("number formats")
    broken = broken_formats(launch, training_device, DTYPES if args.job is None else args.job.dtypes)
    if max(map(len, nodes)) > 1:
        stages.enter("inside a node: making the groups")
        group, _ = dist.new_subgroups_by_enumeration(nodes, timeout=patience)
        inside = _collectives("inside a node", group, launch.local_world_size, whole, stages)
    if launch.num_nodes > 1:
        across = _collectives("across nodes", dist.group.WORLD, launch.world_size, whole, stages)
        pairs = _pair_exchanges(launch, whole[: pair_bytes(args) // 4], stages)
    return RankResult(
        node=launch.node,
        host=socket.gethostname(),
        inside_s=inside,
        across_s=across,
        pairs_s=pairs,
        broken=broken,
    )


def broken_formats(launch: Launch, device: torch.device, dtypes: Sequence[str]) -> dict[str, str]:
    """Number formats in which an all-reduce fails: the backend's error, or the wrong sum.

    Collective over the job. Only two ranks contribute to the sum, so every format represents it exactly.
    """
    own = {0: 1.0, launch.world_size - 1: 2.0}.get(launch.rank, 0.0)
    broken = {}
    for name in dtypes:
        try:
            result = torch.full((5,), own, device=device, dtype=getattr(torch, name))
            dist.all_reduce(result)
            if (sums := set(result.tolist())) != {3.0}:
                broken[name] = f"1 + 2 is {', '.join(f'{each:g}' for each in sorted(sums))}"
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            broken[name] = _first_line(error)
    return broken


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _collectives(
    where: str, group: dist.ProcessGroup | None, ranks: int, whole: torch.Tensor, stages: Stages
) -> dict[str, float]:
    part = torch.ones(len(whole) // ranks, device=whole.device)
    gathered = whole[: len(part) * ranks]
    seconds = {}
    for operation, run in (
        ("all-reduce", lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)),
        ("all-gather", lambda: dist.all_gather_single(gathered, part, group=group)),
    ):
        stages.enter(f"{where}: {operation}")
        seconds[operation] = _median_s(run, whole.device)
    return seconds


def _pair_exchanges(launch: Launch, sent: torch.Tensor, stages: Stages) -> tuple[tuple[int, float], ...]:
    """Exchange with the same local rank of the partner node, on all ranks at once: each GPU by its own network card.

    Uses as many ranks per node as the smallest node has, so that pairs are comparable.
    """
    received, seconds, nodes = torch.empty_like(sent), [], launch.nodes()
    for number, node in enumerate(partners_of(launch.node, launch.num_nodes)):
        stages.enter(f"pairs of nodes: round {number + 1}")
        dist.all_reduce(torch.zeros(1, device=sent.device))
        _synchronize(sent.device)
        if node != launch.node and launch.local_rank < min(map(len, nodes)):
            peer = nodes[node][launch.local_rank]
            seconds.append((node, _median_s(partial(_swap, sent, received, peer), sent.device)))
    return tuple(seconds)


def _swap(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UPS):
        run()
    seconds = []
    for _ in range(REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        run()
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
