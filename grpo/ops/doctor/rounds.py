"""One node's part in `grpo doctor`: alone, as the head of several, or as another one of them.

Each examines this node, shows its part of the result, and returns the exit code.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from grpo.ops.doctor.between_nodes import judge, judge_rendezvous
from grpo.ops.doctor.records import DoctorVerdict, Examination, Finding
from grpo.ops.doctor.shared_file import find_shared_file, shared_file
from grpo.ops.doctor.table import one_line, print_failures, show
from grpo.ops.rendezvous.expected import Place
from grpo.ops.rendezvous.rendezvous import RendezvousFailed, attend, preside

BANDWIDTH = "next, how fast the nodes exchange: accelerate launch --config_file CONFIG -m grpo.ops.doctor.bandwidth"

Examine = Callable[[], Examination]


def alone(place: Place, examine: Examine, args: argparse.Namespace) -> int:
    verdict = judge(place.nodes, [examine()])
    _conclude(verdict, args)
    return verdict.exit_code


def _conclude(verdict: DoctorVerdict, args: argparse.Namespace, **shown: str) -> None:
    show(verdict, as_json=args.json, **shown)
    if args.failed_nodes is not None:
        args.failed_nodes.write_text("\n".join(verdict.failed_nodes))


def as_head(place: Place, examine: Examine, args: argparse.Namespace) -> int:
    """Run the head's part: prints the table, and late nodes after it."""
    codes = []

    def publish(verdict: DoctorVerdict) -> str:
        _conclude(verdict, args, next_step=BANDWIDTH)
        codes.append(verdict.exit_code)
        return replace(verdict, reports=()).dumps()

    try:
        with shared_file(args.output_dir) as shared:
            late = preside(
                place,
                lambda: replace(examine(), sees_shared_file=None if shared is None else True),
                lambda own, attendance: publish(judge_rendezvous(place, own, attendance)),
                opening=shared,
            )
    except RendezvousFailed as error:
        publish(judge(place.nodes, [examine()], [Finding.of("join", error.trouble)]))
        late = ()
    for trouble in late:
        print(f"grpo doctor on {place.node}: FAIL: join: {trouble.message} → {trouble.fix}", file=sys.stderr)
    return int(bool(late) or max(codes))


def as_another(place: Place, examine: Examine, args: argparse.Namespace) -> int:
    """Run another node's part: prints one line, or, without the head's verdict, this node's problems."""

    def bring(shared: list[str] | None) -> str:
        report = examine()
        sees = None if shared is None else find_shared_file(Path(shared[0]), shared[1])
        return replace(report, sees_shared_file=sees).dumps()

    try:
        verdict = DoctorVerdict.loads(attend(place, bring))
    except RendezvousFailed as error:
        verdict = judge(place.nodes, [examine()], [Finding.of("join", error.trouble)])
        if args.json:
            show(verdict, as_json=True)
        else:
            print_failures(place.node, verdict)
    else:
        print(one_line(place.node, place.head, verdict), file=sys.stderr if args.json else sys.stdout, flush=True)
    return verdict.exit_code
