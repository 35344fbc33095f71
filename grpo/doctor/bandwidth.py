"""How fast the nodes exchange: the doctor's second stage, started by the launcher that will start the training.

    accelerate launch --config_file configs/4node.yaml ... -m grpo.doctor.bandwidth --params-b 7.6
    torchrun --nproc_per_node 7 ... -m grpo.doctor.bandwidth

So it has training's ranks, devices and backend. It tries the number formats, measures inside each node, over all ranks,
and in rounds of disjoint pairs of nodes, which name a slow one; and it has a deadline of its own.
"""

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.doctor.bandwidth_verdict import RankResult, explain_failure, judge_bandwidth
from grpo.doctor.nccl_log import NcclNetwork, read_nccl_log, warnings_of
from grpo.doctor.network import read_fabric, read_interfaces, route_to
from grpo.doctor.number_formats import DTYPES, find_broken
from grpo.doctor.pairs import pair_rounds
from grpo.doctor.records import Verdict
from grpo.doctor.stage_watch import StageWatch
from grpo.doctor.table import print_table
from grpo.job.files import add_job_arguments, wishes_of
from grpo.job.launch import Launch, read_launch

MB = 10**6
WARM_UPS, REPEATS = 2, 5
PAIR_BYTES = 64 * MB  # at most, from each rank
_BYTES_PER_PARAMETER = 2  # bfloat16, in which weights are pushed
_MARGIN_S = 60.0  # a collective outlasts the stage's deadline, so that the watch ends it and names who is missing


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="grpo.doctor.bandwidth", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), help="as in training; default: nccl with GPUs, else gloo"
    )
    parser.add_argument("--size-mb", type=int, help="of each collective's result; default: 256, and 16 with gloo")
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS", help="default: %(default).0f")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model-bytes", type=int, help="bytes of one push, to tell its seconds")
    model.add_argument("--params-b", type=float, help="the same as 1e9 parameters in bfloat16")
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
    if args.params_b is not None:
        args.model_bytes = round(args.params_b * 1e9 * _BYTES_PER_PARAMETER)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """One rank's part. Returns the same code on every rank: 0, 1 on any FAIL, 2 for a wrong start."""
    args = parse_arguments(argv)
    try:
        launch = read_launch(os.environ)
        if launch.world_size == 1:
            raise ValueError("one rank has nobody to exchange with: start this with the launcher that starts training")
    except ValueError as error:
        print(f"grpo.doctor.bandwidth: {error}", file=sys.stderr)
        return 2
    nccl_log = NcclLog.start() if args.backend == "nccl" and launch.local_rank == 0 else None
    patience = timedelta(seconds=args.deadline + _MARGIN_S)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    host = socket.gethostname()
    shared = dist.PrefixStore("grpo/doctor/results", store)
    beside = dist.PrefixStore("grpo/doctor/results", store.clone())  # `store` may be blocked in a wait when we fail
    shared.set(f"host/{launch.rank}", host)

    def show(verdict: Verdict) -> None:
        if args.json:
            print(verdict.dumps(indent=2), flush=True)
        else:
            print_table(verdict)

    def show_failure(stage: str, what: str, late: Sequence[str]) -> None:
        show(
            explain_failure(
                stage=stage,
                what=what,
                late=late,
                backend=args.backend,
                route_interface=_route_to_another_node(launch, beside),
                num_nodes=launch.num_nodes,
            )
        )

    watch = StageWatch(
        store,
        launch=launch,
        host=host,
        deadline_s=args.deadline,
        on_failure=show_failure,
        cleanup=nccl_log.remove if nccl_log else lambda: None,
    )
    try:
        dist.init_process_group(
            args.backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=patience
        )
        device = _gpu(launch) if args.backend == "nccl" else torch.device("cpu")  # gloo is measured in host memory
        sizes = Sizes.of(args.size_mb * MB, launch.world_size)
        training_device = _gpu(launch) if args.on_gpus else torch.device("cpu")
        watch.enter("number formats")
        broken = find_broken(
            dist.group.WORLD,
            launch.rank,
            launch.world_size,
            training_device,
            DTYPES if args.job is None else args.job.dtypes,
        )
        inside, across, pairs = measure(launch, device, sizes, watch, patience)
        result = RankResult(
            node=launch.node,
            host=host,
            inside_s=inside,
            across_s=across,
            pairs_s=pairs,
            broken=tuple(broken),
            nccl=nccl_log.read() if nccl_log else None,
            route_interface=_route_to_another_node(launch, shared),
            infiniband=tuple(sorted({port.device for port in read_fabric() if port.state == "ACTIVE"})),
        )
        dist.destroy_process_group()
        watch.enter("collecting the results")
        shared.set(f"result/{launch.rank}", result.dumps())
        if launch.rank == 0:
            verdict = judge_bandwidth(
                [RankResult.loads(shared.get(f"result/{rank}")) for rank in range(launch.world_size)],
                backend=args.backend,
                num_bytes=sizes.num_bytes,
                pair_bytes=sizes.pair_bytes,
                model_bytes=args.model_bytes,
                device="CPUs" if training_device.type == "cpu" else "GPUs",
                job_dtypes=None if args.job is None else args.job.dtypes,
            )
            show(verdict)
            shared.set("exit code", str(verdict.exit_code))
        code = int(shared.get("exit code"))
    except (RuntimeError, OSError) as error:  # torch's distributed errors are RuntimeErrors
        warned = nccl_log.warnings() if nccl_log else []
        watch.fail(f"rank {launch.rank} on {host}: {'; '.join([str(error).splitlines()[0], *warned])}")
        return 1
    watch.stop()
    if nccl_log:
        nccl_log.remove()
    return code


def _route_to_another_node(launch: Launch, shared: dist.Store) -> str:
    """The interface that joins this node to the first one, or the first to the last; empty when unknown."""
    partner = 0 if launch.node else (launch.num_nodes - 1) * launch.local_world_size
    if not shared.check([f"host/{partner}"]):
        return ""  # it never came
    return route_to(shared.get(f"host/{partner}").decode(), read_interfaces())[0]


def _gpu(launch: Launch) -> torch.device:
    """On which this rank's weights and gradients are, with either backend: its local rank's."""
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


# -- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the buffers."""

    num_bytes: int
    """Of a collective's result on each rank; a multiple of the world size."""
    pair_bytes: int
    """That each rank sends to its partner."""

    @classmethod
    def of(cls, asked_bytes: int, world_size: int) -> "Sizes":
        unit = 4 * world_size
        return cls(num_bytes=-(-asked_bytes // unit) * unit, pair_bytes=min(asked_bytes, PAIR_BYTES) // 4 * 4)


def measure(
    launch: Launch, device: torch.device, sizes: Sizes, watch: StageWatch, patience: timedelta
) -> tuple[dict[str, float], dict[str, float], tuple[tuple[int, float], ...]]:
    """Seconds inside this rank's node and over all ranks, by operation, and with each partner. Collective over the job,
    on every rank the same stages in the same order."""
    size = launch.local_world_size
    inside: dict[str, float] = {}
    across: dict[str, float] = {}
    if size > 1:
        nodes = [list(range(node * size, (node + 1) * size)) for node in range(launch.num_nodes)]
        watch.enter("inside a node: making the groups")
        group, _ = dist.new_subgroups_by_enumeration(nodes, timeout=patience)
        inside = _collectives("inside a node", group, size, device, sizes, watch)
    if launch.num_nodes > 1:
        across = _collectives("across nodes", dist.group.WORLD, launch.world_size, device, sizes, watch)
    return inside, across, _pair_exchanges(launch, device, sizes, watch)


def _collectives(
    where: str, group: dist.ProcessGroup | None, ranks: int, device: torch.device, sizes: Sizes, watch: StageWatch
) -> dict[str, float]:
    whole = torch.ones(sizes.num_bytes // 4, device=device)
    part = torch.ones(len(whole) // ranks, device=device)
    gathered = whole[: len(part) * ranks]
    seconds = {}
    for operation, run in (
        ("all-reduce", lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)),
        ("all-gather", lambda: dist.all_gather_single(gathered, part, group=group)),
    ):
        watch.enter(f"{where}: {operation}")
        seconds[operation] = _median_s(run, device)
    return seconds


def _pair_exchanges(
    launch: Launch, device: torch.device, sizes: Sizes, watch: StageWatch
) -> tuple[tuple[int, float], ...]:
    """Every rank with the same local rank of the partner node, all at once: each GPU by its own network card."""
    sent, received = (torch.ones(sizes.pair_bytes // 4, device=device) for _ in range(2))
    seconds = []
    for number, pairs in enumerate(pair_rounds(launch.num_nodes) if launch.num_nodes > 1 else []):
        watch.enter(f"pairs of nodes: round {number + 1}")
        _barrier(device)
        partners = {a: b for a, b in pairs} | {b: a for a, b in pairs}
        if (node := partners.get(launch.node)) is not None:
            peer = node * launch.local_world_size + launch.local_rank
            seconds.append((node, _median_s(partial(_swap, sent, received, peer), device)))
    return tuple(seconds)


def _swap(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()


def _barrier(device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device))
    _synchronize(device)


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


# -- NCCL's log ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """NCCL's own log of this process, in a folder of ours."""

    folder: Path

    @classmethod
    def start(cls) -> "NcclLog | None":
        """Before NCCL is loaded; None where the user directs the log already."""
        if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
            return None
        folder = Path(tempfile.mkdtemp(prefix="grpo-doctor-"))
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
        os.environ["NCCL_DEBUG_FILE"] = str(folder / "nccl.log")
        return cls(folder=folder)

    def _text(self) -> str:
        log = self.folder / "nccl.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def read(self) -> NcclNetwork:
        return read_nccl_log(self._text())

    def warnings(self) -> list[str]:
        return warnings_of(self._text())

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
