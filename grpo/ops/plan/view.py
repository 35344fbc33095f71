"""Display of a plan: tables for people, one JSON object for programs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from grpo.ops.plan.memory_budget import Budget, Held, readable
from grpo.ops.plan.plan import Plan

if TYPE_CHECKING:  # a plan that ended early has none of these; importing them loads TRL
    from grpo.ops.plan.batch import PlannedBatch
    from grpo.ops.plan.engine_memory import EngineMemory
    from grpo.ops.plan.estimates import Estimates, WeightSyncBytes
    from grpo.place.topology import NodeTopology

WIDTH = 120  # without a terminal
NOTICEABLE_S = 0.1  # per batch: no advice below this
PHASES = {"always": "always", "forward and backward": "fwd + bwd", "optimizer step": "step", "sync": "sync"}


def print_json(plan: Plan) -> None:
    """Print the whole plan as JSON: records become objects, under their fields' names."""
    json.dump(asdict(plan) | {"works": plan.works, "verdict": plan.verdict()}, sys.stdout, indent=1)
    print()


def print_plan(plan: Plan, *, verbose: bool) -> None:
    """Print the plan: verdict, errors and advice; tables with `verbose`."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, emoji=False, markup=False)
    console.print(plan.verdict(), style="bold", soft_wrap=True)
    if verbose:
        _print_tables(console, plan)
    for title, lines, style in (
        ("the model", [plan.trains] if plan.trains else [], ""),
        ("CANNOT WORK", plan.errors, "bold red"),
        ("UNKNOWN", plan.unknown, "bold red"),
        ("WARNING", plan.warnings, "bold yellow"),
        ("advice, by estimate", [plan.advice.line()] if plan.advice and plan.advice.step_s > NOTICEABLE_S else [], ""),
        ("assumed", ["; ".join(plan.assumptions)] if plan.assumptions else [], ""),
    ):
        for line in lines:
            console.print(f"{title}: {line}", style=style, soft_wrap=True)
    if plan.nodes is not None and not verbose:
        console.print("--verbose shows placement, batch and memory as tables")


def _print_tables(console: Console, plan: Plan) -> None:
    if plan.nodes is not None:
        _print_nodes(console, plan.nodes)
    if plan.batch is not None and plan.nodes is not None:
        _print_batch(console, plan.batch, plan.nodes)
    if plan.estimates is not None and plan.model is not None and plan.batch is not None:
        console.print(
            f"\n{plan.model.name}: {plan.model.num_parameters:,} parameters in {plan.model.num_layers} layers. "
            "All memory below is estimated.",
            style="bold",
        )
        if plan.lora is not None:
            console.print(f"{plan.lora}. {plan.model.trained.elements:,} parameters are trained.", soft_wrap=True)
        _print_estimates(console, plan.estimates, plan.batch)


def _print_nodes(console: Console, nodes: "tuple[NodeTopology, ...]") -> None:
    """Print one picture for each kind of node, and the formula over all of them."""
    num_ranks, num_reserved = nodes[0].world_size, sum(len(node.reserved_devices) for node in nodes)
    num_gpus = sum(len(node.devices) for node in nodes)

    def kind(node: "NodeTopology") -> tuple[int, int, int]:
        return len(node.devices), len(node.reserved_devices), node.local_world_size

    for _, same in groupby(sorted(nodes, key=lambda node: (kind(node), node.node)), key=kind):
        alike = list(same)
        first = alike[0]
        numbers = ", ".join(str(node.node) for node in alike)
        title = "every node" if len(alike) == len(nodes) else f"node {numbers}"
        table = Table(box=box.SQUARE, title=f"{title} ({len(alike)} of {len(nodes)})", title_justify="left")
        cells = _device_roles(first)
        for device, _ in cells:
            table.add_column(device, justify="center")
        table.add_row(*(role for _, role in cells))
        console.print(table)
    idle = num_gpus - num_ranks - num_reserved
    if num_gpus:
        total = f"{num_gpus} GPUs = {num_ranks} ranks + {num_reserved} reserved" + (f" + {idle} idle" if idle else "")
        engines = _some(sum(node.num_engines for node in nodes), "engine")
        size = _some(nodes[0].tensor_parallel_size, "GPU")
        console.print(f"{_some(len(nodes), 'node')}: {total}; {engines} of {size}")
    else:
        engines = _some(nodes[0].num_engines, "engine")
        console.print(f"{_some(len(nodes), 'node')} without GPUs: {num_ranks} ranks, {engines} on each")


def _device_roles(node: "NodeTopology") -> list[tuple[str, str]]:
    """(device, role) for each device of a node, or for each process without GPUs."""
    ranks = [
        f"rank {node.rank + index}" if node.num_nodes == 1 else f"train {index}"
        for index in range(node.local_world_size)
    ]
    owner = {device: f"engine {index}" for index, devices in enumerate(node.engines) for device in devices}
    if not node.devices:
        return [("CPU", role) for role in [*ranks, *(f"engine {index}" for index in range(node.num_engines))]]
    roles = ranks + [owner.get(device, "idle") for device in node.devices[node.local_world_size :]]
    return [(f"GPU {index}", role) for index, role in enumerate(roles)]


def _print_batch(console: Console, batch: "PlannedBatch", nodes: "tuple[NodeTopology, ...]") -> None:
    steps = batch.optimizer_steps_per_generation
    console.print(
        f"batch: {nodes[0].world_size} ranks x {batch.micro_batch_completions} completions x "
        f"{batch.accumulated_micro_batches} accumulated = {batch.completions_per_step} completions per optimizer step"
        f"{' on any number of ranks' if batch.is_pinned else ''}, at most {batch.tokens_per_step:,} tokens "
        f"({batch.sequence_tokens} each)\n"
        f"generation: {batch.generation_completions} completions = {batch.generation_prompts} prompts x "
        f"{batch.num_generations}, cut into {_some(batch.steps_per_generation, 'micro-batch', 'es')}: "
        f"{_some(steps, 'optimizer step')} per generation"
        + (f", sampled {batch.generation_lookahead} ahead while the ranks train" if batch.generation_lookahead else "")
        + f"\non each node: {_each(batch.node_completions)} completions = "
        f"{_each([completions / batch.num_generations for completions in batch.node_completions])} groups of "
        f"{batch.num_generations} "
        + ("(a group straddles two nodes, which is allowed)" if batch.straddles else "(no group straddles nodes)")
        + f", at most {max(batch.engine_completions)} for an engine",
        soft_wrap=True,
    )


def _print_estimates(console: Console, estimates: "Estimates", batch: "PlannedBatch") -> None:
    has_gpus = estimates.engine.capacity_bytes is not None
    _print_budget(console, "one training GPU" if has_gpus else "one rank (host memory)", estimates.training)
    _print_engine(console, estimates.engine, batch)
    if estimates.first_sync is not None:
        console.print(f"an engine's first weight sync: {_sync(estimates.first_sync)}", soft_wrap=True)
    name = "a weight sync" if estimates.first_sync is None else "every other weight sync"
    console.print(f"{name}: {_sync(estimates.sync)}", soft_wrap=True)


def _print_budget(console: Console, title: str, budget: Budget) -> None:
    table = _table(title, "held", "", "estimate", "how")
    for line in budget.lines:
        size = readable(line.num_bytes)
        held = PHASES[line.phase] + ("" if line.holder == "every rank" else f", {line.holder}")
        table.add_row(held, line.what, size if line.counted else f"({size})", line.how)
    table.add_section()
    if any(line.phase != "always" for line in budget.lines):
        for phase in budget.held:
            table.add_row(PHASES[phase.phase], *_together(phase))
    capacity = "" if budget.capacity_bytes is None else f"of {readable(budget.capacity_bytes)}"
    when = "" if budget.peak_phase == "always" else f"always + {PHASES[budget.peak_phase]}; in brackets: not counted"
    table.add_row("at most", "", readable(budget.peak_bytes), " ".join(filter(None, (capacity, when))), style="bold")
    console.print(table)


def _together(held: Held) -> tuple[str, str, str]:
    local_main, others = readable(held.local_main_bytes), readable(held.other_ranks_bytes)
    what = "all together" if held.phase == "always" else "all together, with what is always held"
    return what, local_main, "" if local_main == others else f"on a node's local main; {others} on its other ranks"


def _print_engine(console: Console, engine: "EngineMemory", batch: "PlannedBatch") -> None:
    on_gpu = engine.capacity_bytes is not None
    table = _table("one GPU of an engine" if on_gpu else "one worker of an engine (host memory)", "", "estimate", "how")
    table.add_row("weights", readable(engine.weights_bytes), "the engine's share of all parameters")
    if engine.adapters_bytes:
        table.add_row("adapters", readable(engine.adapters_bytes), "vLLM's slot for one, and the one that came")
    if engine.encoder_cache_bytes:
        table.add_row("encoder cache", readable(engine.encoder_cache_bytes), "of images, as the tower gave them")
    if on_gpu:
        assert engine.budget_bytes is not None
        table.add_row("overhead", readable(engine.overhead_bytes), "an allowance: context, graphs, activations")
        share = f"what is left of {readable(engine.budget_bytes)}, vllm_gpu_memory_utilization of the GPU"
        table.add_row("KV cache", readable(engine.kv_cache_bytes), share)
    else:
        table.add_row("KV cache", readable(engine.kv_cache_bytes), "fixed without GPUs")
    table.add_section()
    at_once = min(engine.sequences_at_once, engine.max_num_seqs)
    waves = -(-max(batch.engine_completions) // at_once) if at_once else 0
    limit = f"{readable(engine.kv_bytes_per_sequence)} each; vLLM's max_num_seqs is {engine.max_num_seqs}"
    table.add_row(
        f"sequences of {engine.sequence_tokens} tokens",
        str(engine.sequences_at_once),
        limit + (f": {max(batch.engine_completions)} completions in {_some(waves, 'wave')}" if waves else ""),
        style="bold",
    )
    console.print(table)


def _sync(sync: "WeightSyncBytes") -> str:
    text = f"{readable(sync.engine_bytes)} to each engine, inside the node"
    if sync.network_bytes_per_node:
        text = f"{readable(sync.network_bytes_per_node)} into each node over the network, {text}"
    if sync.gathered_bytes_per_node:
        text = f"{readable(sync.gathered_bytes_per_node)} gathered in each node, {text}"
    return text


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("held", "how", "") else "right")
    return table


def _each(numbers: Sequence[float]) -> str:
    """'224'; '112 + 96' if nodes differ."""
    return " + ".join(f"{number:g}" for number in (numbers if len({*numbers}) > 1 else numbers[:1]))


def _some(number: float, noun: str, plural: str = "s") -> str:
    """'1 node', '4 nodes'."""
    return f"{number:g} {noun}{'' if number == 1 else plural}"
