"""`grpo doctor`: one machine, or one process per node without a launcher, which could not name missing nodes.

A launcher starts the second stage, `grpo.ops.doctor.bandwidth`.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from grpo.ops.rendezvous import expected
from grpo.place.files import add_job_arguments, wishes_of

DEFAULT_PORT = 29411  # below torchrun's 29500, not a well-known port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    expected.add_arguments(parser, default_port=DEFAULT_PORT)
    what = parser.add_argument_group("what else to check")
    what.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs that each node must see")
    what.add_argument("--output-dir", type=Path, metavar="DIR", help="space in it, and whether all nodes share it")
    what.add_argument("--model", help="a folder or a Hub name: is it complete on every node")
    what.add_argument("--dataset", help="a path or a Hub name: the same")
    add_job_arguments(parser.add_argument_group("the job", "does it ask for CPUs, which data set"))
    parser.add_argument(
        "--failed-nodes", type=Path, metavar="FILE", help="gets, on the head, the names of the nodes with a FAIL"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0, 1 on any FAIL on any node, 2 if the command line does not identify this node."""
    # Before torch is loaded: the store's C++ side logs every wait that ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        place = expected.find_place(args, os.environ, command="grpo doctor")
        job = wishes_of(args)
    except (ValueError, OSError) as error:
        print(f"grpo doctor: {error}", file=sys.stderr)
        return 2
    from grpo.ops.doctor.report import examine
    from grpo.ops.doctor.rounds import alone, as_another, as_head

    peers = place.nodes[1:] if place.is_head else (place.head_address,)
    part = alone if len(place.nodes) == 1 else as_head if place.is_head else as_another
    return part(place, partial(examine, place.node, args, job, os.environ, peers=peers), args)
