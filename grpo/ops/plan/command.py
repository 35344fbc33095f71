"""`grpo plan`: placement, sizes and memory of a job, before anybody waits for a cluster.

Runs on any machine, without a GPU: it plans for the GPUs of the cluster.
"""

import argparse
import re

from grpo.ops.plan.gpus import ASSUMED_GPU, GPUS
from grpo.place.files import read_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config_file", metavar="FILE", help="accelerate's file, as in `accelerate launch`")
    parser.add_argument("--num_processes", type=_positive, metavar="N", help="of all nodes; overrides the file's")
    parser.add_argument(
        "--ranks-per-node", type=_gpu_counts, metavar="7 | 7,6", help="as of `grpo launch`; overrides the file's"
    )
    parser.add_argument("--num_machines", type=_positive, metavar="N", help="nodes; overrides the file's")
    parser.add_argument("--config", metavar="FILE", help="the training file of train.py; without it, its demo")
    parser.add_argument(
        "--model",
        "--model_name_or_path",
        metavar="NAME | FOLDER",
        help="the model, before the training file's; alone, it is sized without data, rewards and launcher file",
    )
    parser.add_argument(
        "--gpus-per-node", type=_gpu_counts, metavar="8 | 8,8,7,8", help="of all nodes alike, or of each (default: 8)"
    )
    parser.add_argument(
        "--gpu",
        choices=GPUS,
        help=f"memory and speed by its data sheet (default: {ASSUMED_GPU.gib}GiB and an {ASSUMED_GPU.name}'s speed)",
    )
    parser.add_argument("--gpu-memory", type=_memory, metavar="SIZE", help="of one GPU, e.g. 40GiB; overrides --gpu")
    parser.add_argument(
        "--prompt-tokens", type=_positive, metavar="N", help="the longest prompt, the tokens of its images included"
    )
    parser.add_argument("--images", type=_positive, metavar="N", help="prompts come with images, at most so many each")
    parser.add_argument("--image-size", type=_size, metavar="WxH", help="of one in pixels, as the tower gets it")
    parser.add_argument(
        "--gpu-tflops", type=_rate, metavar="N", help="of one GPU in bfloat16, for seconds and advice; overrides --gpu"
    )
    parser.add_argument(
        "--gpu-tbps", type=_rate, metavar="N", help="terabytes a second from one GPU's memory, likewise"
    )
    parser.add_argument("--verbose", action="store_true", help="also placement, batch and memory as tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="flags of train.py, after `--`")


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if something in it cannot work or its memory is unknown."""
    from grpo.ops.plan.plan import Plan
    from grpo.ops.plan.view import print_json, print_plan

    plan = Plan(errors=_unreadable_files(args))
    if not plan.errors:
        from grpo.ops.plan.planner import make_plan  # loads TRL, which takes seconds

        plan = make_plan(args)
    if args.json:
        print_json(plan)
    else:
        print_plan(plan, verbose=args.verbose)
    return 0 if plan.works else 1


def _unreadable_files(args: argparse.Namespace) -> list[str]:
    """Errors of the files themselves."""
    errors = []
    for option, file in (("--config_file", args.config_file), ("--config", args.config)):
        try:
            if file is not None:
                read_settings(file, option, takes_json=option == "--config_file")
        except ValueError as error:
            errors.append(str(error))
    return errors


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 1024x768")
    return int(match[1]), int(match[2])


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _gpu_counts(text: str) -> tuple[int, ...]:
    """Parse '8' or '8,8,7,8'."""
    return tuple(_positive(part.strip()) for part in text.split(","))


def _memory(text: str) -> int:
    """Parse '80GiB' or '1.5 TB' to bytes: powers of 1024 with an i, of 1000 without."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT])(i?)B", text.strip())
    if match is None or match[1].count(".") > 1 or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it with its unit, such as 80GiB, 80GB or 1TiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1))
