"""`grpo eval CHECKPOINT`: a saved model on the evaluation sets of its run, with this machine's engines and no trainer.

Slow imports follow after the command line is parsed.
"""

import argparse
import sys
from pathlib import Path

from grpo.faults.signals import exiting_on_sigterm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="<output_dir>/checkpoint-<step>, or any folder with a model"
    )
    parser.add_argument("--set", action="append", dest="sets", metavar="NAME", help="this set alone; may be repeated")
    parser.add_argument(
        "--engines", type=int, metavar="N", help="how many (default: as many as the GPUs make; 1 on CPUs)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the engines (default: the run's)"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="what engines print (default: beside the checkpoint)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "train_flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of train.py, after `--`, over those that the run was started with",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command: returns 0, or 1 with the reason on stderr."""
    try:
        if not args.checkpoint.is_dir():
            raise ValueError(
                f"{args.checkpoint} is no folder: give <output_dir>/checkpoint-<step>, or an exported model"
            )
        if args.engines is not None and args.engines < 1:
            raise ValueError(f"--engines is {args.engines}; it must be 1 or more")

        from grpo.ops.evaluate.evaluating import evaluate
        from grpo.ops.evaluate.job import read_job
        from grpo.ops.evaluate.view import print_json, print_table

        job = read_job(args.checkpoint, args.train_flags, args.sets or [])
        with exiting_on_sigterm():
            results = evaluate(job, num_engines=args.engines, dtype=args.dtype, log=args.log)
    except (OSError, ValueError, RuntimeError) as error:  # `EngineError` is a RuntimeError
        print(f"grpo eval: {error}", file=sys.stderr)
        return 1
    (print_json if args.json else print_table)(job, results)
    return 0
