"""`grpo trace RUN`: a run's timelines as a file for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

import argparse
import gzip
import json
import sys
from pathlib import Path

from grpo.ops.trace.events import Trace, trace_of
from grpo.record.durable import write_atomically
from grpo.record.files import DAMAGED, TIMELINE_FOLDER, read_attempts
from grpo.record.timeline.records import Timeline, read_timelines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's output_dir")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="the file to write, compressed if it ends in .gz; it is replaced (default: RUN/trace.json)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0, or 1 with the reason on stderr."""
    out = args.out or args.run / "trace.json"
    try:
        trace, notes = make_trace(args.run)
        size_bytes = write_trace(trace, out)
    except (OSError, ValueError) as error:
        print(f"grpo trace: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"grpo trace: WARNING: {note}", file=sys.stderr)
    print(
        f"{out}: {trace.num_spans} spans of {trace.num_nodes} node(s), {size_bytes / 1e6:.1f} MB; "
        "open it in https://ui.perfetto.dev, which keeps it in the browser"
    )
    return 0


def make_trace(output_dir: Path) -> tuple[Trace, list[str]]:
    """Make the trace of the run in `output_dir`, with warnings about missing parts.

    Raises:
        ValueError: there is no readable timeline.
    """
    folder = output_dir / TIMELINE_FOLDER
    if not output_dir.is_dir():
        raise ValueError(f"{output_dir} is no folder: give a run's output_dir")
    timelines = read_timelines(output_dir)
    if not timelines:
        raise ValueError(
            f"{folder} has no node<k>.jsonl: give the output_dir of a run in local mode, which writes them"
        )
    trace = trace_of(timelines)
    if trace.num_nodes == 0:
        raise ValueError(f"nothing in {folder} can be read as a timeline: {trace.unreadable} damaged line(s)")
    return trace, _missing_parts(output_dir, timelines, trace)


def _missing_parts(output_dir: Path, timelines: list[Timeline], trace: Trace) -> list[str]:
    notes = []
    there = {each.node for each in timelines if each.attempts or each.spans or each.usages}
    expected = max(_nodes_of(output_dir), max(each.node for each in timelines) + 1)
    if missing := [str(node) for node in range(expected) if node not in there]:
        which = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(missing)}"
        notes.append(f"{which} of {expected}: no timeline in {output_dir / TIMELINE_FOLDER}, so not in the trace")
    if trace.unreadable:
        notes.append(f"{trace.unreadable} line(s) that cannot be read were left out")
    return notes


def _nodes_of(output_dir: Path) -> int:
    """Largest number of nodes of the run, from run.json; 0 if unknown."""
    try:
        attempts = read_attempts(output_dir)
        return max((int(each["topology"]["num_nodes"]) for each in attempts), default=0)
    except (OSError, *DAMAGED):
        return 0


def write_trace(trace: Trace, out: Path) -> int:
    """Write the trace, whole or not at all; return its size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder: name a file in it, as {out / 'trace.json'}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {out.parent}")
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"began_unix_s": trace.began}}).removesuffix("}")
    lines = (json.dumps(event, separators=(",", ":"), allow_nan=False) for event in trace.events)
    # One event a line, so that other tools can read a long trace too.
    separated = ",\n".join(lines)
    content = f'{head}, "traceEvents": [\n{separated}\n]}}\n'.encode()
    write_atomically(out, gzip.compress(content, mtime=0) if out.suffix == ".gz" else content)
    return out.stat().st_size
