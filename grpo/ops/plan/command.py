"""`grpo plan`: what goes where, what it adds up to, and whether it fits, before anybody waits for a cluster.

Needs no GPU: it plans for the cluster's, on any machine.
"""

import argparse
import re

from grpo.ops.plan.memory_budget import A100_TBPS, A100_TFLOPS, ASSUMED_GPU_GIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", metavar="FILE", help="accelerate's file, as in `accelerate launch`")
    parser.add_argument("--num_processes", type=_positive, metavar="N", help="goes before the file's; of all nodes")
    parser.add_argument("--num_machines", type=_positive, metavar="N", help="goes before the file's")
    parser.add_argument("--config", metavar="FILE", help="the training file of train.py; without it, its demo")
    parser.add_argument(
        "--gpus-per-node", type=_gpu_counts, metavar="8 | 8,8,7,8", help="of all nodes alike, or of each (default: 8)"
    )
    parser.add_argument(
        "--gpu-memory", type=_memory, metavar="SIZE", help=f"of one GPU, e.g. 40GiB (default: {ASSUMED_GPU_GIB}GiB)"
    )
    parser.add_argument("--prompt-tokens", type=_positive, metavar="N", help="the longest prompt")
    parser.add_argument(
        "--gpu-tflops",
        type=_rate,
        default=A100_TFLOPS,
        metavar="N",
        help="of one GPU in bfloat16, for the advice on how many to reserve (default: %(default)g, an A100's; an "
        "H100's is 989)",
    )
    parser.add_argument(
        "--gpu-tbps",
        type=_rate,
        default=A100_TBPS,
        metavar="N",
        help="terabytes a second from one GPU's memory, likewise (default: %(default)g, an A100's; an H100's is 3.35)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="flags of train.py, after `--`")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 1 when something in it cannot work."""
    from grpo.ops.plan.planner import make_plan
    from grpo.ops.plan.view import print_json, print_plan

    plan = make_plan(args)
    (print_json if args.json else print_plan)(plan)
    return 1 if plan.errors else 0


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _gpu_counts(text: str) -> tuple[int, ...]:
    """'8' or '8,8,7,8'."""
    return tuple(_positive(part.strip()) for part in text.split(","))


def _memory(text: str) -> int:
    """Bytes of '80GiB' or '1.5 TB': powers of 1024 with an i, of 1000 without."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT])(i?)B", text.strip())
    if match is None or match[1].count(".") > 1 or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it with its unit, such as 80GiB, 80GB or 1TiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1))
