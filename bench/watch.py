"""Sentinels of many nodes that are held at random: that no alarm is false, what watching costs, how fast it notices.

So many sentinels, each with one light rank, on this machine. Each sentinel, node 0's too, is stopped (SIGSTOP) for up
to `--pause` seconds and runs for as long, again and again: as machines that swap do. An alarm ends the benchmark with
its record. Then all run, and the load of node 0's sentinel is measured, which hears all the others. At last a node is
killed, its rank and its sentinel, and the seconds are counted until the last rank of the others has the record.

    python -m bench.watch [--nodes 64] [--seconds 600] [--pause 8]
"""

import argparse
import heapq
import random
import signal
import time
from collections.abc import Sequence

import psutil

from bench.report import Figure, Ratio, Report, argument_parser, finish
from grpo.faults.liveness import HEARTBEAT_TIMEOUT_S
from tests.support.sentinels import LightNode, everyone, light_job

CALM_S = 60.0
GOAL_S = 5.0  # until the last one of so many nodes knows


def check(nodes: Sequence[LightNode]) -> None:
    """Raises RuntimeError, with the record, where a rank has one."""
    for rank in everyone(nodes):
        if not rank.is_running():
            raise RuntimeError(f"a false alarm: rank {rank.rank} got: {rank.record()}")


def hold_at_random(nodes: Sequence[LightNode], seconds: float, pause_s: float) -> tuple[int, float]:
    """How often a sentinel was held, and for how long at most."""
    draw, now = random.Random(7), time.monotonic()
    end, held, longest_s = now + seconds, 0, 0.0
    turns = [(now + draw.uniform(0, pause_s), node, False) for node in range(len(nodes))]
    heapq.heapify(turns)
    while turns:
        at, node, is_held = heapq.heappop(turns)
        time.sleep(max(0.0, at - time.monotonic()))
        nodes[node].sentinel.send_signal(signal.SIGCONT if is_held else signal.SIGSTOP)
        check(nodes)
        if is_held and at > end:
            continue
        length_s = draw.uniform(0, pause_s)
        if not is_held:
            held, longest_s = held + 1, max(longest_s, length_s)
        heapq.heappush(turns, (time.monotonic() + length_s, node, not is_held))
    return held, longest_s


def load_of(node: LightNode, seconds: float) -> float:
    """Of a core, in %."""
    process, begun = psutil.Process(node.sentinel.pid), time.monotonic()
    before = sum(process.cpu_times()[:2])  # user and system
    time.sleep(seconds)
    return 100 * max(0.0, sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)


def seconds_to_notice(nodes: Sequence[LightNode], killed: int) -> float:
    """From a node's end until the last rank of the others has the record, which names it."""
    begun = time.monotonic()
    nodes[killed].send(signal.SIGKILL)
    others = [rank for node in nodes if node.node != killed for rank in node.ranks]
    records = {rank.record() for rank in others}
    if {record.node for record in records} != {killed} or len(records) > 1:
        raise RuntimeError(f"node {killed} was killed, and {len(records)} records name nodes {records}")
    return time.monotonic() - begun


def measure(args: argparse.Namespace) -> Report:
    timeout_s = HEARTBEAT_TIMEOUT_S
    held, longest_s, loads, noticed = 0, 0.0, [], []
    for number in range(args.repetitions):
        with light_job(timeout_s, nodes=args.nodes, ranks=1) as nodes:
            if number == 0:
                held, longest_s = hold_at_random(nodes, args.seconds, args.pause)
            loads.append(load_of(nodes[0], args.calm))
            check(nodes)
            noticed.append(seconds_to_notice(nodes, random.Random(number).randrange(1, args.nodes)))
    return Report(
        benchmark="watch",
        settings={"nodes": args.nodes, "seconds": args.seconds, "pause": args.pause, "heartbeat_timeout": timeout_s},
        ratios=(
            Ratio(
                name=f"{GOAL_S:g} s / until all know of a killed node",
                values=tuple(GOAL_S / each for each in noticed),
                goal=1.0,
            ),
        ),
        figures=(
            Figure(name="false alarms", unit="", values=(0.0,)),
            Figure(name="times that a sentinel was held", unit="", values=(float(held),)),
            Figure(name="longest time that one was held", unit="s", values=(longest_s,)),
            Figure(name="until all know of a killed node", unit="s", values=tuple(noticed)),
            Figure(name="node 0's sentinel, of a core", unit="%", values=tuple(loads)),
        ),
        notes=(
            "All nodes are on one machine, with one light rank each; a false alarm ends the benchmark.",
            "The load is measured while no sentinel is held.",
        ),
    )


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0, help="in which sentinels are held at random")
    parser.add_argument("--pause", type=float, default=8.0, help="seconds that one is held at most")
    parser.set_defaults(repetitions=3)
    args = parser.parse_args()
    args.calm = CALM_S
    if args.short:
        args.nodes, args.seconds, args.pause, args.calm, args.repetitions = 4, 4.0, 2.0, 1.0, 1
    finish(measure(args), args)


if __name__ == "__main__":
    main()
