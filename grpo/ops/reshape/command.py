"""`grpo reshape CHECKPOINT --ranks N`: convert a checkpoint of M training processes for N, to resume from.

Slow imports come after the command line is parsed.
"""

import argparse
import sys
from pathlib import Path

from grpo.checkpoints.checkpoints import check_is_checkpoint
from grpo.faults.signals import exiting_on_sigterm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="<output_dir>/checkpoint-<step>")
    parser.add_argument("--ranks", metavar="N", type=int, required=True, help="training processes of the new job")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="the folder to write, new or empty (default: <output_dir>-ranks-<N>/checkpoint-<step>, so that a run with "
        "that output_dir goes on from it with --resume auto)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0, or 1 with the reason on stderr."""
    out = args.out or default_out(args.checkpoint, args.ranks)
    try:
        check_is_checkpoint(args.checkpoint)

        from grpo.ops.reshape.reshaping import reshape

        with exiting_on_sigterm():
            settings = reshape(args.checkpoint, out, ranks=args.ranks)
    except (OSError, ValueError) as error:
        print(f"grpo reshape: {error}", file=sys.stderr)
        return 1
    shown = ", ".join(f"{name}: {value}" for name, value in settings.items())
    print(f"{out}: for {args.ranks} training processes. Go on with {shown}")
    return 0


def default_out(checkpoint: Path, ranks: int) -> Path:
    run_dir = checkpoint.resolve().parent
    return run_dir.with_name(f"{run_dir.name}-ranks-{ranks}") / checkpoint.resolve().name
