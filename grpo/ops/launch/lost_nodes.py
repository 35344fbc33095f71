"""Lost nodes of a Slurm job, while an attempt runs on some of them and after it has failed.

    python -m grpo.ops.launch.lost_nodes OUTPUT_DIR --job 17 --attempt 0 --srun PID --here a --nodes a,b,c,d,e --used 4

Runs in the job's batch script, beside the attempt's srun. A node is lost if Slurm cannot run `true` on it, or if the
attempt's state lists it as silent: its network may be gone although Slurm still reaches it. A running node is lost too
if it is a faulty host (`grpo.ops.launch.faulty_host`): its GPU may be broken. If an attempt fails for another reason,
all nodes are well. An srun that would wait for a lost node is ended. Prints the names of lost nodes, one per line.
Needs only Python and srun.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from grpo.faults.failure import Decision, FailureKind, answer_to_end
from grpo.ops.launch.faulty_host import read_faulty_host
from grpo.ops.launch.next_attempt import parser_for, read_end
from grpo.record.files import Entry

POLL_S = 2.0
GRACE_S = 5.0  # for the other nodes' ranks, which end by themselves once the job has failed; then as long as a probe
PROBE_S = 15.0  # srun itself gives up on a node after 10 s by default (MessageTimeout)
SRUN_END_S = 5.0


def silent_nodes(state: Entry | None) -> list[int]:
    """Silent nodes in the attempt's record, by `grpo launch`'s numbers."""
    is_lost = state is not None and state["state"] == "failed" and state.get("kind") == FailureKind.NODE_LOST
    return list(state.get("nodes", ())) if state is not None and is_lost else []


def probe(nodes: Sequence[str]) -> set[str]:
    """Nodes on which Slurm cannot run a step of this job within `PROBE_S`."""
    options = ["--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=0", "--gres=none", "--quiet"]
    probes = {
        node: subprocess.Popen(
            ["srun", *options, f"--nodelist={node}", "--output=/dev/null", "--error=/dev/null", "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in nodes
    }
    lost, deadline = set(), time.monotonic() + PROBE_S
    for node, process in probes.items():
        try:
            if process.wait(max(0.0, deadline - time.monotonic())):
                lost.add(node)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            lost.add(node)
    return lost


def lost_nodes(state: Entry | None, nodes: Sequence[str], *, used: int, here: str) -> list[str]:
    """Lost nodes of the job; the attempt runs on the first `used`.

    Args:
        here: this node. If Slurm cannot run anything here either, Slurm itself does not answer, and no node is lost.
    """
    lost = probe([*dict.fromkeys((*nodes, here))])
    if here in lost:
        lost = set()
    lost |= {nodes[silent] for silent in silent_nodes(state) if silent < used} - {here}
    return [node for node in nodes if node in lost]


def watch(srun: int, state: Callable[[], Entry | None], find: Callable[[Entry | None], list[str]]) -> list[str]:
    """Wait for the end of an attempt's srun, and return the nodes lost; ends srun if it waits for a lost node.

    Args:
        srun: pid.
        state: returns the attempt's end, None until then.
        find: `lost_nodes`; called when the attempt has failed, and when srun has ended without success.
    """
    pidfd: int | None = None
    has_failed_since, has_looked = None, False
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        pidfd = os.pidfd_open(srun)
    while pidfd is not None and not select.select([pidfd], [], [], POLL_S)[0]:
        ended = state()
        if has_looked or ended is None or ended["state"] != "failed" or not _may_be_a_nodes_fault(ended):
            continue
        has_failed_since = has_failed_since or time.monotonic()
        if time.monotonic() - has_failed_since < GRACE_S:
            continue
        has_looked = True
        if lost := find(ended):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if not select.select([pidfd], [], [], SRUN_END_S)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return lost
    ended = state()
    return find(ended) if _may_be_a_nodes_fault(ended) else []


def _may_be_a_nodes_fault(ended: Entry | None) -> bool:
    is_over = ended is not None and ended["state"] in ("finished", "stopped")
    return not is_over and answer_to_end(ended) is Decision.REPLACE_NODE


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--srun", required=True, type=int, metavar="PID", help="of the attempt")
    parser.add_argument("--nodes", required=True, help="of the job, with commas between them")
    parser.add_argument("--here", required=True, metavar="NODE", help="this one, which may be out of use")
    parser.add_argument("--used", required=True, type=int, metavar="N", help="the attempt runs on the first N of them")
    args = parser.parse_args(argv)
    nodes = args.nodes.split(",")
    find = partial(lost_nodes, nodes=nodes, used=args.used, here=args.here)
    lost = watch(args.srun, partial(read_end, args), find)
    faulty = read_faulty_host(args.output_dir, read_end(args))
    for node in nodes:
        if node in lost or node == faulty:
            print(node)
    return 0


if __name__ == "__main__":
    sys.exit(main())
