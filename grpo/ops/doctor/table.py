"""Display of the verdict: one table, and one line for a node whose head prints the table."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo.ops.doctor.records import DoctorVerdict, Finding, Status
from grpo.ops.rendezvous.trouble import list_nodes

_COLOURS = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
_LOG_WIDTH = 120  # columns if the output is not a terminal: of srun, a pod log


def rows(findings: Sequence[Finding]) -> list[Finding]:
    """Order findings for the table: checks by their first finding, failures first in each check, and its PASSes in one
    row, with the first node's message if messages differ."""
    shown = []
    for check in dict.fromkeys(finding.check for finding in findings):
        of_check = [finding for finding in findings if finding.check == check]
        passed = [finding for finding in of_check if finding.status is Status.PASS]
        for status in (Status.FAIL, Status.WARN):
            shown += [finding for finding in of_check if finding.status is status]
        if passed:
            messages = [finding.message for finding in passed]
            nodes = dict.fromkeys(node for finding in passed for node in finding.nodes)
            message = messages[0] if len(set(messages)) == 1 else f"e.g. {messages[0]}"
            shown.append(Finding.passed(check, message, nodes=nodes))
    return shown


def show(verdict: DoctorVerdict, *, as_json: bool, next_step: str = "") -> None:
    """Print the verdict to stdout, as one JSON document or as the table with a last line.

    Args:
        next_step: printed below the table of several nodes, unless the verdict is FAIL.
    """
    if as_json:
        print(json.dumps({"status": verdict.status, **asdict(verdict)}, indent=2), flush=True)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _LOG_WIDTH)
    several = len(verdict.nodes) > 1
    table = Table(pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("")
    if several:
        table.add_column("nodes", max_width=24)
    table.add_column("what was seen, and → what to do", overflow="fold")
    for row in rows(verdict.findings):
        text = Text(row.message)
        if row.fix:
            text.append(f"\n→ {row.fix}")
        nodes = "all" if set(row.nodes) == set(verdict.nodes) else list_nodes(row.nodes)
        status = Text(row.status, style=_COLOURS[row.status])
        table.add_row(row.check, status, *([nodes] if several else []), text)
    console.print(table)
    counts = [(status, sum(finding.status is status for finding in verdict.findings)) for status in reversed(Status)]
    reported = ", ".join(f"{count} {status}" for status, count in counts if count)
    console.print(Text.assemble("grpo doctor: ", (verdict.status, _COLOURS[verdict.status]), f" ({reported})"))
    if next_step and several and verdict.exit_code == 0:
        console.print(Text(next_step))
    sys.stdout.flush()


def print_failures(node: str, verdict: DoctorVerdict) -> None:
    """Print the problems of a node without a head, in lines that make sense among other nodes' output."""
    for finding in verdict.findings:
        if finding.status is not Status.PASS:
            print(f"grpo doctor on {node}: {finding.status}: {finding.check}: {finding.message} → {finding.fix}")
    sys.stdout.flush()


def one_line(node: str, head: str, verdict: DoctorVerdict) -> str:
    """One line for a node whose head prints the table."""
    failed = dict.fromkeys(finding.check for finding in verdict.findings if finding.status is Status.FAIL)
    why = f" ({', '.join(failed)})" if failed else ""
    return f"grpo doctor on {node}: {verdict.status}{why}; the table is in the output of {head}"
