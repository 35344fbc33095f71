"""1 to 64 nodes of 8 GPUs, simulated from one node: step time, idle shares and weight sync time of each layout.

`bench/scale_model.py` has the layouts, their assumptions and formulas. Two nodes are simulated:

- assumed: GPUs of 80 GB and a model of 7.6 B parameters; tokens per second of an engine and of a training GPU are
  options (--sample-tokens-per-s, --train-tokens-per-s), set to what such GPUs are commonly seen to do. Not measured.
- measured: where `bench.overlap` has left a result (that of GPUs first). Its one engine and one rank are taken for one
  GPU each, eight of them for a node; without GPUs these are cores and a small model, and the links stay those of the
  options: its step times say how the layouts compare when compute decides, its weight syncs say nothing.

What share of its bound a weight sync and an overlapped step reach is read from the results of `bench.weight_sync` and
`bench.overlap`, for both nodes; without them it is 1, and the notes say so.

The assumed node is simulated once more with completions of many lengths, short answers and long reasoning, and up to 8
batches under way (`bench/scale_lengths.py`): with those, what idles ranks is the longest completions of a batch, in a
central pool one ahead and colocated as much as in nodes one ahead. The same simulation, fed with the constants that
`bench.overlap --ragged` has measured, foretells that benchmark's steps; how well is in the table.

What would change the picture, in favour of the alternatives:
- A central pool with as many engine GPUs as the nodes reserve together is as fast or faster (it is in the table): one
  queue knows no slowest node, and an RDMA broadcast carries the weights. It costs a second service to run.
- Nodes that differ in speed (--spread): central queues level them; node-local engines wait for the slowest node, unless
  `vllm_balance_nodes` moves prompts, as it does in the rows with lengths and two batches under way or more.
- Colocated engines waste no GPU on waiting when generation and training cannot be balanced by whole GPUs, and win when
  the host link is fast and the model small; with long completions the smaller KV cache works against them.
- Weights that go over shared storage or a slow network (--network-gbps) cost every layout that has engines elsewhere
  the same again; the gather is common to all.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import scale_lengths, scale_predicted
from bench.report import RESULTS, Figure, Ratio, Report, argument_parser, finish
from bench.scale_model import NETWORK_GBPS, NVLINK_GBPS, Cluster, Node, Step, simulate

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
OWN, OWN_OF_LENGTHS = "node-local, lookahead 1", "node-local, lookahead 4"  # what others are compared with
PREDICTED = 0.9  # how near the model is to the steps of `bench.overlap --ragged`
GOALS = {"central pool, lookahead 4": 0.95, "central pool, lookahead 1": 3.0}  # with lengths, at the largest size


def read_result(folder: Path, benchmark: str) -> dict[str, Any] | None:
    """A benchmark's last result, that of GPUs first."""
    for path in (folder / f"{benchmark}-cuda.json", folder / f"{benchmark}.json"):
        if path.exists():
            return json.loads(path.read_text())
    return None


def share_of_bound(result: dict[str, Any] | None) -> float | None:
    """The median of the ratio whose name begins with 'bound', at most 1; None where there is none."""
    for ratio in (result or {}).get("ratios", []):
        if ratio["name"].startswith("bound"):
            return min(1.0, ratio["median"])
    return None


def measured_node(overlap: dict[str, Any], assumed: Node) -> Node:
    """Eight devices like the engine and the rank of an on-policy step of `bench.overlap`."""
    median = {figure["name"].strip(): figure["median"] for figure in reversed(overlap["figures"])}  # on-policy ones
    settings = overlap["settings"]
    wait_s = median["waiting for completions"]
    rest_s = median["step, lookahead 0"] - wait_s - median["weight sync"]
    return replace(
        assumed,
        name=f"measured ({settings['device']})",
        parameters=settings["parameters"],
        completions=settings["completions"] * assumed.gpus,
        completion_tokens=settings["completion_tokens"],
        sample_s=wait_s / settings["completions"],
        train_s=rest_s / settings["completions"],
    )


def make_report(args: argparse.Namespace, results: Path) -> tuple[Report, dict[str, list[Step]]]:
    """The report, and the steps by node's name."""
    overlap, sync = read_result(results, "overlap"), read_result(results, "weight_sync")
    shares = {"overlap": share_of_bound(overlap), "sync": share_of_bound(sync)}
    assumed = Node(
        name="assumed",
        gpus=args.gpus,
        parameters=round(args.parameters_b * 1e9),
        completions=args.completions,
        completion_tokens=args.completion_tokens,
        sample_s=args.completion_tokens / args.sample_tokens_per_s,
        train_s=args.completion_tokens / args.train_tokens_per_s,
        sync_efficiency=shares["sync"] or 1.0,
        overlap_efficiency=shares["overlap"] or 1.0,
    )
    cluster = Cluster(
        network_gbps=args.network_gbps, nvlink_gbps=args.nvlink_gbps, host_gbps=args.host_gbps, spread=args.spread
    )
    nodes = [assumed, *([] if overlap is None else [measured_node(overlap, assumed)])]
    counts = tuple(count for count in NODE_COUNTS if count <= args.max_nodes)
    steps = {node.name: simulate(node, cluster, node_counts=counts, reserved=args.reserved) for node in nodes}
    with_lengths = {
        lengths.name: scale_lengths.simulate(
            assumed,
            cluster,
            lengths,
            node_counts=[count for count in scale_lengths.NODE_COUNTS if count <= args.max_nodes],
            reserved=args.reserved,
            steps=2 if args.short else 10,
        )
        for lengths in (scale_lengths.SHORT, scale_lengths.TAIL)
    }
    predicted = scale_predicted.predict(read_result(results, "overlap_ragged"))
    report = Report(
        benchmark="scale",
        settings={
            **asdict(cluster),
            "reserved": args.reserved or "best for one node",
            "nodes": [asdict(node) for node in nodes],
            "steps": {name: [asdict(step) for step in of_node] for name, of_node in (steps | with_lengths).items()},
        },
        ratios=(
            *(ratio for name, of_node in steps.items() for ratio in _ratios(name, of_node, OWN, {})),
            *(
                ratio
                for name, of_node in with_lengths.items()
                for ratio in _ratios(name, of_node, OWN_OF_LENGTHS, GOALS)
            ),
            *(
                Ratio(
                    name=f"bench.overlap --ragged, lookahead {lookahead}: 1 - |step of the model / step - 1|",
                    values=(1 - abs(model_s / step_s - 1),),
                    goal=PREDICTED,
                )
                for lookahead, (model_s, step_s) in predicted.items()
            ),
        ),
        figures=(
            *(figure for name, of_node in steps.items() for figure in _figures(name, of_node)),
            *(figure for name, of_node in with_lengths.items() for figure in _figures_of_lengths(name, of_node)),
            *(
                Figure(name=f"bench.overlap --ragged, lookahead {lookahead}: step{of}", unit="s", values=(seconds,))
                for lookahead, (model_s, step_s) in predicted.items()
                for of, seconds in ((" of the model", model_s), ("", step_s))
            ),
        ),
        notes=(
            "simulated; formulas and assumptions: bench/scale_model.py, bench/scale_lengths.py and bench/scale.py",
            "bench.overlap --ragged: training and weight sync of each lookahead as measured, the wait predicted",
            *(
                f"{lengths.name}: {lengths.median:,} tokens in the median and at most {lengths.longest:,}; of "
                f"{args.gpus} GPUs reserved with {_reserved(with_lengths[lengths.name])}"
                for lengths in (scale_lengths.SHORT, scale_lengths.TAIL)
            ),
            *(
                f"share of the bound that bench.{name} reaches: "
                + ("not measured yet, taken for 1" if share is None else f"{share:.2f}, measured on one machine")
                for name, share in shares.items()
            ),
        ),
    )
    return report, steps | with_lengths


def _ratios(name: str, steps: Sequence[Step], compared: str, goals: Mapping[str, float]) -> list[Ratio]:
    """The other layouts' step over one of ours, at the largest size."""
    largest = max(step.nodes for step in steps)
    at = {step.layout: step for step in steps if step.nodes == largest}
    own = at[compared]
    return [
        Ratio(
            name=f"{name}, {largest} node{'s' * (largest > 1)}: {layout} / {compared}",
            values=(step.step_s / own.step_s,),
            goal=goals.get(layout),
        )
        for layout, step in at.items()
        if step is not own
    ]


def _reserved(steps: Sequence[Step]) -> str:
    """How many GPUs of a node each layout samples on; those that colocate leave none out."""
    return "; ".join(
        f"{step.layout}: {step.engine_gpus}" for step in steps if step.nodes == 1 and "colocated" not in step.layout
    )


def _figures_of_lengths(name: str, steps: Sequence[Step]) -> list[Figure]:
    """Steps at all sizes, idle shares at the largest."""
    largest, figures = max(step.nodes for step in steps), []
    for step in steps:
        place = f"{name}, {step.nodes} node{'s' * (step.nodes > 1)}, {step.layout}"
        figures.append(Figure(name=f"{place}: step", unit="s", values=(step.step_s,)))
        if step.nodes == largest:
            figures.append(Figure(name=f"{place}: training GPUs idle", unit="%", values=(100 * step.training_idle,)))
    return figures


def _figures(name: str, steps: Sequence[Step]) -> list[Figure]:
    """Steps at the smallest size, everything at the largest; the JSON's settings hold all sizes."""
    smallest, largest = min(step.nodes for step in steps), max(step.nodes for step in steps)
    figures = []
    for step in steps:
        values = {"step": (step.step_s, "s")}
        if step.nodes == largest:
            values |= {
                "weight sync": (step.sync_s, "s"),
                "training GPUs idle": (100 * step.training_idle, "%"),
                "engine GPUs idle": (100 * step.engine_idle, "%"),
            }
        if step.nodes in (smallest, largest):
            place = f"{name}, {step.nodes} node{'s' if step.nodes > 1 else ''}, {step.layout}"
            figures += [
                Figure(name=f"{place}: {what}", unit=unit, values=(value,)) for what, (value, unit) in values.items()
            ]
    return figures


def draw(steps: dict[str, list[Step]], path: Path) -> None:
    """One row of charts for each node: step time, weight sync time, idle shares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "step [s]": lambda step: step.step_s,
        "weight sync [s]": lambda step: step.sync_s,
        "training GPUs idle [%]": lambda step: 100 * step.training_idle,
        "engine GPUs idle [%]": lambda step: 100 * step.engine_idle,
    }
    figure, rows = pyplot.subplots(
        len(steps), len(panels), figsize=(16, 4 * len(steps)), squeeze=False, layout="constrained"
    )
    for axes, (name, of_node) in zip(rows, steps.items(), strict=True):
        for axis, (title, value) in zip(axes, panels.items(), strict=True):
            for layout in dict.fromkeys(step.layout for step in of_node):
                line = [step for step in of_node if step.layout == layout]
                axis.plot([step.nodes for step in line], [value(step) for step in line], marker="o", label=layout)
            axis.set_xscale("log", base=2)
            axis.set_xticks([step.nodes for step in line], [str(step.nodes) for step in line])
            axis.set_title(f"{name}: {title}")
            axis.set_xlabel("nodes")
            if title.startswith("step"):
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
        axes[0].legend(fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argument_parser("Step time, idle shares and weight sync time of 1 to 64 nodes, simulated from one node.")
    parser.add_argument("--gpus", type=int, default=8, help="of a node")
    parser.add_argument("--max-nodes", type=int, default=64)
    parser.add_argument("--reserved", type=int, help="GPUs of a node for engines (default: the best for one node)")
    parser.add_argument("--parameters-b", type=float, default=7.6, help="billions; assumed node")
    parser.add_argument("--completions", type=int, default=256, help="of a node and step; assumed node")
    parser.add_argument("--completion-tokens", type=int, default=1024, help="in the mean; assumed node")
    parser.add_argument("--sample-tokens-per-s", type=float, default=6000.0, help="of an engine's GPU; assumed node")
    parser.add_argument("--train-tokens-per-s", type=float, default=6000.0, help="of a training GPU; assumed node")
    parser.add_argument("--network-gbps", type=float, default=NETWORK_GBPS, help="gigabits per second into a node")
    parser.add_argument("--nvlink-gbps", type=float, default=NVLINK_GBPS, help="gigabits per second into a GPU")
    parser.add_argument("--host-gbps", type=float, default=400.0, help="between a GPU and host memory")
    parser.add_argument("--spread", type=float, default=0.05, help="of an engine's generation time")
    parser.set_defaults(repetitions=1, device="cpu")  # nothing is run here
    args = parser.parse_args()
    if args.short:
        args.max_nodes = min(args.max_nodes, 4)
    report, steps = make_report(args, RESULTS)
    finish(report, args)
    chart = args.output.with_suffix(".png") if args.output else None if args.short else RESULTS / "scale.png"
    if chart is not None:
        draw(steps, chart)


if __name__ == "__main__":
    main()
