"""Two nodes that hold episodes, one of which has twice the turns: what that costs the other one, and what not.

Two nodes on one machine, each a process with a trainer and an engine, as in `bench.multi_turn`. Both have the same
episodes; in turn with that the second node's have every turn twice. What is compared is the first node's own time,
from its first turn to its last answer: no turn of it waits for the other node's. The batch ends when both have ended.

    python -m bench.neighbours [--rows 16]
"""

import json
import multiprocessing
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.utils.network_utils import get_open_port

from bench.multi_turn import MAX_TOOL_S, Play, make_trainer, save_model
from bench.report import Figure, Report, argument_parser, finish, interleave, ratio
from grpo import GRPOTrainer

NUM_NODES = 2
MAX_WAIT_S = 500.0
GOAL = 0.9


def run_node(node: int, options: Any, folder: Path, port: int) -> None:
    """One node: the seconds of its batches, by variant, go to `node<k>.json`."""
    cores = sorted(os.sched_getaffinity(0))
    if options.device == "cpu":
        os.sched_setaffinity(0, {cores[node % len(cores)]})
    torch.set_num_threads(1)
    launch: dict[str, Any] = {"RANK": node, "WORLD_SIZE": NUM_NODES, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    launch |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": NUM_NODES, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in launch.items()}
    play = Play(options.rows, seed=7)
    turns, delays_s = play.turns, play.delays_s
    own: dict[str, list[float]] = {"alike": [], "twice": []}
    with play.on():
        trainer: Any = make_trainer(GRPOTrainer, play, folder / "model", folder / "run", options)
        trainer.model.train()
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step

        def batch(variant: str) -> float:
            times = 2 if (variant, node) == ("twice", 1) else 1
            play.turns = [times * count for count in turns]
            play.delays_s = [(times * [*delays, MAX_TOOL_S / 2])[:-1] for delays in delays_s]
            trainer._sync_tool_dicts = [{"work": trainer.tools[0]}] * options.rows
            trainer._async_tool_dicts = [{}] * options.rows
            trainer.accelerator.wait_for_everyone()
            begun = time.perf_counter()
            trainer._generate(play.prompts())
            seconds = time.perf_counter() - begun
            own[variant].append(trainer.vllm_generation.last_batch.reports[node].generate_s)
            return seconds

        for variant in own:
            batch(variant)  # warm
            own[variant].clear()
        seconds = interleave({variant: partial(batch, variant) for variant in own}, options.repetitions)
        (folder / f"node{node}.json").write_text(json.dumps({"batch": seconds, "own": own}))
        trainer.accelerator.wait_for_everyone()
        trainer.close()


def measure(options: Any, folder: Path) -> Report:
    save_model(folder / "model")
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
    first, second = (json.loads((folder / f"node{node}.json").read_text()) for node in range(NUM_NODES))
    alike = Figure(name="first node, both alike", unit="s", values=tuple(first["own"]["alike"]))
    beside = Figure(name="first node, beside twice the turns", unit="s", values=tuple(first["own"]["twice"]))
    others = Figure(name="second node, twice the turns", unit="s", values=tuple(second["own"]["twice"]))
    batch = Figure(name="batch, one with twice the turns", unit="s", values=tuple(first["batch"]["twice"]))
    return Report(
        benchmark="neighbours",
        settings={"nodes": NUM_NODES, "episodes of a node": options.rows},
        ratios=(
            ratio("first node: both alike / beside twice the turns", alike, beside, GOAL),
            ratio("second node's own time / the batch's", others, batch),
        ),
        figures=(alike, beside, others, batch),
        notes=("Two nodes on one machine; on a CPU each has a core of its own.",),
    )


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=16, help="episodes of a node's batch")
    options = parser.parse_args()
    if options.short:
        options.rows, options.repetitions = 8, 1
    with tempfile.TemporaryDirectory(prefix="bench-neighbours-") as folder:
        finish(measure(options, Path(folder)), options)


if __name__ == "__main__":
    main()
