"""`grpo report RUN [RUN ...] [--watch SECONDS] [--out FILE]`: a run, or several in comparison, as one page."""

import argparse
import sys
import time
from pathlib import Path

PAGE = "report.html"
DAY_S = 86_400
CHARTS = ("altair", "vl_convert")  # modules of the extra `report`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="a run's output_dir; two to eight come over each other"
    )
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="write the page again every so often, until the runs have ended"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the page (default: RUN/{PAGE}; of several runs ./{PAGE})"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0, or 1 with the reason on stderr. Ctrl-C ends `--watch`."""
    if args.watch is not None and not 0 < args.watch <= DAY_S:
        print(f"grpo report: --watch is {args.watch:g}: give seconds, more than 0 and up to a day", file=sys.stderr)
        return 1
    try:
        from grpo.ops.report.page import write_report
    except ModuleNotFoundError as error:
        if error.name not in CHARTS:
            raise
        print(f"grpo report: {error.name} is not installed: pip install 'grpo-local[report]'", file=sys.stderr)
        return 1
    out = args.out or (args.runs[0] / PAGE if len(args.runs) == 1 else Path(PAGE))
    try:
        while True:
            began = time.monotonic()
            runs = write_report(args.runs, out)
            reported = ", ".join(f"{each.name} {each.state or 'state not known'}, step {each.step}" for each in runs)
            size = out.stat().st_size / 1e6
            print(f"{out}: {reported} ({size:.1f} MB in {time.monotonic() - began:.1f} s)", flush=True)
            if args.watch is None or all(each.has_ended for each in runs):
                return 0
            time.sleep(args.watch)
    except (OSError, ValueError) as error:
        print(f"grpo report: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
