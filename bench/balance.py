"""`vllm_balance_nodes` with one node at half speed, on and off in turn.

Two nodes on one machine, each a process with an engine with made-up weights; completions of one length; no training.
What is timed is a generation batch as training sees it: from the prompts until every rank has its completions. On a CPU
each node has a core of its own. The slow node's engine is stopped and continued in turn, half of the time each.

Then with batches under way, as `generation_lookahead` of 2 or more has them: prompts are shared out by what each node
owes. No batch can take less than its tokens over what both engines make in a second, and it is held against that.

    python -m bench.balance
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.utils.network_utils import get_open_port

from bench.engines import VOCAB_SIZE, config, save_model, started
from bench.report import Figure, Ratio, Report, argument_parser, finish, interleave, ratio
from grpo.faults.sentinel_start import watch_for
from grpo.groups.agreement import agree_on_topology
from grpo.groups.node_groups import NodeGroups
from grpo.place.topology import read_topology
from grpo.rollout.balance import NodeBalance
from grpo.rollout.node import LocalMainSampler, NodeSampler
from grpo.rollout.pool import EnginePool
from grpo.rollout.prompts import Prompts

NUM_NODES = 2
NUM_GENERATIONS = 4
PROMPT_TOKENS = 32
SETTLING_BATCHES = 4  # until the nodes' speeds are known
UNDER_WAY = 3
COST = 1.15  # a goal: of a batch with batches under way, over what both engines could
MAX_WAIT_S = 250.0

SLICE_S = 0.01
HALVE = """
import os, signal, sys, time
bench, engine, slice_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
try:
    while os.getppid() == bench:  # not longer than the benchmark
        for action in (signal.SIGSTOP, signal.SIGCONT):
            os.killpg(engine, action)
            time.sleep(slice_s)
finally:
    os.killpg(engine, signal.SIGCONT)
"""


@contextlib.contextmanager
def half_speed(engine_pid: int) -> Iterator[None]:
    """An engine, with all its processes, runs every other slice of time."""
    arguments = [str(os.getpid()), str(engine_pid), str(SLICE_S)]
    halving = subprocess.Popen([sys.executable, "-c", HALVE, *arguments])
    try:
        yield
    finally:
        halving.kill()
        halving.wait()
        os.killpg(engine_pid, signal.SIGCONT)


def run_node(node: int, options: Any, folder: Path, port: int) -> None:
    """One node: the seconds of its batches, by variant, go to `node<k>.json`."""
    cores = sorted(os.sched_getaffinity(0))
    if options.device == "cpu":
        os.sched_setaffinity(0, {cores[node % len(cores)]})
    torch.set_num_threads(1)
    launch: dict[str, Any] = {"RANK": node, "WORLD_SIZE": NUM_NODES, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    launch |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": NUM_NODES, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in launch.items()}
    dist.init_process_group("gloo", rank=node, world_size=NUM_NODES)
    topology, pids = agree_on_topology(
        lambda: read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None),
        node,
        NUM_NODES,
        timeout_s=MAX_WAIT_S,
    )
    watch = watch_for(topology, {node: pids[node]})
    groups = NodeGroups(topology, max_wait_s=MAX_WAIT_S)
    args = config(
        folder / f"node{node}",
        options.device,
        max_completion_length=options.tokens,
        vllm_max_model_length=PROMPT_TOKENS + options.tokens,
        vllm_sync_backend="shm",
        vllm_gpu_memory_utilization=0.4,
        vllm_engine_kwargs={"enforce_eager": True, "max_num_seqs": options.window},
        generation_kwargs={"ignore_eos": True},
    )
    with watch.guard(), started(args, folder / "model", 1) as (clients, windows):
        pool = EnginePool(clients, max_num_seqs=windows, max_tokens=options.tokens)

        def sampler(balance_nodes: bool, *, overlaps: bool = False) -> NodeSampler:
            return LocalMainSampler(
                groups,
                watch,
                pool,
                timeout_s=MAX_WAIT_S,
                balance=NodeBalance(groups, topology.engines_by_node) if balance_nodes else None,
                overlaps=overlaps,
            )

        rng = np.random.default_rng(node)
        speeds: list[float] = []

        def rows() -> Prompts:
            prompts = rng.integers(2, VOCAB_SIZE, size=(options.prompts, PROMPT_TOKENS)).tolist()
            return Prompts.of([prompt for prompt in prompts for _ in range(NUM_GENERATIONS)])

        def batch(of: NodeSampler) -> Callable[[], float]:
            def seconds() -> float:
                asked = rows()
                dist.barrier()
                begun = time.perf_counter()
                completions, reports = of.collect(of.submit(asked, base_seed=0))
                seconds = time.perf_counter() - begun
                assert (completions.lengths == options.tokens).all()
                if of is alone:
                    speeds.append(reports[0].tokens_per_s / reports[1].tokens_per_s)
                return seconds

            return seconds

        def under_way(batches: int) -> tuple[list[float], list[float]]:
            """Seconds of each batch, and those that it takes at the speed of both engines."""
            ahead = sampler(True, overlaps=True)
            pending = deque(ahead.submit(rows(), base_seed=0, order=number) for number in range(UNDER_WAY))
            ends_s, bounds_s = [], []
            for number in range(UNDER_WAY, UNDER_WAY + SETTLING_BATCHES + batches):
                _, reports = ahead.collect(pending.popleft())
                ends_s.append(time.perf_counter())
                bounds_s.append(tokens_of_a_batch(options) / sum(report.tokens_per_s for report in reports))
                pending.append(ahead.submit(rows(), base_seed=0, order=number))
            while pending:
                ahead.collect(pending.popleft())
            took_s = [after - before for before, after in itertools.pairwise(ends_s)]
            return took_s[-batches:], bounds_s[-batches:]

        balanced, alone = sampler(True), sampler(False)
        batch(alone)()  # warm
        speeds.clear()
        with half_speed(clients[0].pid) if node == 1 else contextlib.nullcontext():
            for _ in range(SETTLING_BATCHES):
                batch(balanced)()
            seconds = interleave({"balanced": batch(balanced), "alone": batch(alone)}, options.repetitions)
            took_s, bounds_s = under_way(2 * options.repetitions)
        found = {**seconds, "speeds": speeds, "under way": took_s, "bounds": bounds_s}
        (folder / f"node{node}.json").write_text(json.dumps(found))
        pool.close()
    dist.barrier()
    watch.stop()
    dist.barrier()


def tokens_of_a_batch(options: Any) -> int:
    return NUM_NODES * options.prompts * NUM_GENERATIONS * options.tokens


def measure(options: Any, folder: Path) -> Report:
    save_model(folder / "model", options.size)
    port = get_open_port()
    context = multiprocessing.get_context("fork")  # everything is imported once
    nodes = [context.Process(target=run_node, args=(node, options, folder, port)) for node in range(NUM_NODES)]
    try:
        for process in nodes:
            process.start()
        deadline = time.monotonic() + MAX_WAIT_S
        for process in nodes:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode != 0 for process in nodes):
            raise RuntimeError(f"the nodes ended with {[process.exitcode for process in nodes]}")
    finally:
        for process in nodes:
            if process.pid is not None:
                process.kill()
    of_node = [json.loads((folder / f"node{node}.json").read_text()) for node in range(NUM_NODES)]
    num_tokens = tokens_of_a_batch(options)
    balanced, alone = (
        Figure(
            name=name,
            unit="tokens/s",
            values=tuple(num_tokens / max(pair) for pair in zip(of_node[0][key], of_node[1][key], strict=True)),
        )
        for name, key in (("balanced", "balanced"), ("every node for itself", "alone"))
    )
    speeds = Figure(
        name="fast node / slow node, tokens/s of their engines", unit="", values=tuple(of_node[0]["speeds"])
    )
    # The mean: what one batch waits for, the next one has.
    took_s, bound_s = (statistics.mean(of_node[0][key]) for key in ("under way", "bounds"))
    ahead = Figure(name=f"a batch with {UNDER_WAY} under way", unit="s", values=(took_s,))
    bound = Figure(name="a batch's tokens / tokens/s of both engines", unit="s", values=(bound_s,))
    return Report(
        benchmark="balance",
        settings={
            "nodes": NUM_NODES,
            "model": options.size,
            "window": options.window,
            "groups of a node": f"{options.prompts} of {NUM_GENERATIONS}",
            "tokens": options.tokens,
        },
        ratios=(
            ratio("balanced / every node for itself", balanced, alone, goal=1.3),
            Ratio(
                name=f"{COST} x tokens / tokens/s of both engines / a batch with {UNDER_WAY} under way",
                values=(COST * bound_s / took_s,),
                goal=1.0,
            ),
        ),
        figures=(balanced, alone, speeds, ahead, bound),
        notes=("Two nodes on one machine; no training; the slow one's engine is stopped half of the time.",),
    )


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--size", choices=("small", "tiny"), default="tiny", help="of the engines' made-up model")
    parser.set_defaults(repetitions=4, window=16, prompts=12, tokens=64)
    options = parser.parse_args()
    if options.short:
        options.size, options.repetitions, options.prompts, options.tokens = "tiny", 1, 4, 8
    with tempfile.TemporaryDirectory(prefix="bench-balance-") as folder:
        finish(measure(options, Path(folder)), options)


if __name__ == "__main__":
    main()
