"""`grpo doctor`: is this machine, or this cluster, able to run it.

Alone on one machine, or one process per node before any launcher: with static rendezvous a launcher waits in its own
store before a worker starts, and names nobody. The second stage, `grpo.doctor.bandwidth`, is started by the launcher.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from grpo.job.files import add_job_arguments, wishes_of

JOIN_TIMEOUT_S = 60.0
POD_JOIN_TIMEOUT_S = 900.0  # pods of a job are scheduled, and pull their images, minutes apart
DEFAULT_PORT = 29411  # below torchrun's 29500, above nothing well known
BANDWIDTH = "next, how fast the nodes exchange: accelerate launch --config_file CONFIG -m grpo.doctor.bandwidth"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    nodes = parser.add_argument_group("which nodes", "by default those of the Slurm job, or this machine alone")
    nodes.add_argument("--nodes", metavar="A,B,C", help="expected nodes, the head first; Slurm's n[1-4] is understood")
    nodes.add_argument("--nodes-file", type=Path, metavar="FILE", help="the same, one host per line")
    nodes.add_argument(
        "--node-rank", type=int, metavar="K", help="which of them this is, from 0; default: by host name"
    )
    nodes.add_argument("--node-name", metavar="NAME", help="the same by name")
    nodes.add_argument("--head", metavar="ADDRESS", help="where the others reach the head; default: its name")
    nodes.add_argument("--port", type=int, default=DEFAULT_PORT, help="of the head's store (default: %(default)s)")
    nodes.add_argument(
        "--join-timeout",
        type=float,
        metavar="SECONDS",
        default=POD_JOIN_TIMEOUT_S if in_pod else JOIN_TIMEOUT_S,
        help=f"from the first node that is up (default: {JOIN_TIMEOUT_S:.0f}; on Kubernetes {POD_JOIN_TIMEOUT_S:.0f})",
    )
    what = parser.add_argument_group("what else to check")
    what.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs that each node must see")
    what.add_argument("--output-dir", type=Path, metavar="DIR", help="room in it, and whether all nodes share it")
    what.add_argument("--model", help="a folder or a hub name: is it complete on every node")
    what.add_argument("--dataset", help="a path or a hub name: the same")
    add_job_arguments(parser.add_argument_group("the job", "does it ask for CPUs, which backend, which number formats"))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 on any FAIL on any node, 2 when the command line does not say which node this is."""
    started = time.monotonic()
    # Before torch is loaded: the store's C++ side logs every wait that ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from grpo.doctor.agreement import judge
    from grpo.doctor.expected import find_place
    from grpo.doctor.meeting import attend, preside
    from grpo.doctor.records import NodeReport, Verdict
    from grpo.doctor.report import Asked, examine
    from grpo.doctor.table import one_line, print_failures, print_table

    try:
        place = find_place(
            nodes=args.nodes,
            nodes_file=args.nodes_file,
            node_name=args.node_name,
            node_rank=args.node_rank,
            head=args.head,
            port=args.port,
            env=os.environ,
        )
        job = wishes_of(args)
    except (ValueError, OSError) as error:
        print(f"grpo doctor: {error}", file=sys.stderr)
        return 2
    asked = Asked(
        gpus_per_node=args.gpus_per_node,
        output_dir=args.output_dir,
        model=args.model,
        dataset=args.dataset,
        job=job,
    )

    def examine_here() -> NodeReport:
        peers = place.nodes[1:] if place.is_head else (place.head_address,)
        return examine(place.node, asked, os.environ, peers=peers)

    def show(verdict: Verdict) -> None:
        if args.json:
            print(verdict.dumps(indent=2), flush=True)
        else:
            print_table(verdict, next_step=BANDWIDTH if len(place.nodes) > 1 else "")

    if len(place.nodes) == 1:
        verdict = judge(place.nodes, [examine_here()])
        show(verdict)
    elif place.is_head:
        verdict = preside(
            place,
            examine_here,
            show,
            output_dir=args.output_dir,
            join_timeout_s=args.join_timeout,
            started=started,
        )
    else:
        verdict, is_the_heads = attend(place, examine_here, join_timeout_s=args.join_timeout, started=started)
        if is_the_heads:
            print(one_line(place.node, place.head, verdict), file=sys.stderr if args.json else sys.stdout, flush=True)
        elif args.json:
            show(verdict)
        else:
            print_failures(place.node, verdict)
    return verdict.exit_code
