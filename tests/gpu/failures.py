"""What stays of a failed test: its jobs' logs, in a folder beside the report, and what they say of the failure."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tests.support.contract import records_in
from tests.support.kept_logs import keep

# Of a traceback, or of a launcher: the first is the cause, what follows from it comes behind.
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception): .*$", re.MULTILINE)


def keep_logs(
    name: str, folders: Iterable[Path], into: Path, *, stacks: Path | None, text: str
) -> tuple[list[str], list[Path]]:
    """Copy what its jobs and its own `tmp_path` hold.

    Args:
        stacks: where those of the test's own process are, if it hung.
        text: what pytest says of the failure.

    Returns:
        Of each job the first line of its failure record, or its first error where it has none; and the logs' paths.
    """
    kept = keep(name, folders, into)
    notes = {"stacks.txt": stacks.read_text() if stacks is not None else "", "pytest.txt": text}
    written = [kept / note for note, content in notes.items() if content and (kept / note).write_text(content)]
    found = [what for log in sorted(kept.rglob("job.log")) if (what := _what_failed(log))]
    return list(dict.fromkeys(found)), sorted(kept.rglob("*.log")) + written


def _what_failed(log: Path) -> str:
    text = log.read_text(errors="replace")
    if records := records_in(text):
        return f"the job failed on {records[0].splitlines()[0]}"
    state = log.with_name("run_state.json")  # where a mistake before the first step is kept for the scheduler
    kept = json.loads(state.read_text()) if state.exists() else {}
    if kept.get("state") == "failed":
        return kept["why"].splitlines()[0]
    error = _ERROR.search(text)
    return error[0] if error else ""
