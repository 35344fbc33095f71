"""`grpo export CHECKPOINT OUT`: a checkpoint as a plain Hugging Face folder, or its adapter as a PEFT folder.

Slow imports follow after the command line is parsed.
"""

import argparse
import sys
from pathlib import Path

from grpo.checkpoints.checkpoints import check_is_checkpoint
from grpo.faults.signals import exiting_on_sigterm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="<output_dir>/checkpoint-<step>")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; new, or empty")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="cast to it; default: the dtype that the model was trained in. From the float32 master weights where "
        "ZeRO-3 saved them",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="largest file of weights, e.g. 5GB (default: transformers' own)"
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a LoRA run: the base with the adapter merged into it; else the adapter"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="with --merge: the base, where it is not where the adapter says that it was"
    )
    parser.add_argument(
        "--allow-incomplete",
        action="store_true",
        help="export also when complete.json is missing, or files are not as it says",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that the model or its tokenizer brings along"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command: returns 0, or 1 with the reason on stderr."""
    try:
        check_is_checkpoint(args.checkpoint)

        import torch

        from grpo.ops.export.exporting import export
        from grpo.ops.export.writing import DEFAULT_SHARD_SIZE, Options

        options = Options(
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            max_shard_size=args.max_shard_size or DEFAULT_SHARD_SIZE,
            allow_incomplete=args.allow_incomplete,
            trust_remote_code=args.trust_remote_code,
            merge=args.merge,
            base=args.base,
        )
        with exiting_on_sigterm():
            exported = export(args.checkpoint, args.out, options)
    except (OSError, ValueError) as error:
        print(f"grpo export: {error}", file=sys.stderr)
        return 1
    for note in exported.notes:
        print(f"grpo export: {note}", file=sys.stderr)
    print(
        f"{args.out}: {exported.num_bytes / 1e9:.3f} GB of {' and '.join(exported.dtypes)} in {exported.num_files} "
        f"file(s), from {exported.origin}"
    )
    return 0
