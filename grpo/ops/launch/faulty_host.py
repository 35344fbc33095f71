"""Which host is to be replaced, by what `run.json` says of the last two attempts. Needs nothing but Python."""

from collections.abc import Sequence
from pathlib import Path

from grpo.faults.failure import Decision, answer_to_end
from grpo.record.files import DAMAGED, Entry, read_attempts

DOCTOR_PHASE = "doctor"
_OF_THE_START = frozenset(("start", "process groups", "engine start"))  # nothing of a step's data is there yet


def faulty_host(attempts: Sequence[Entry]) -> str:
    """The host that two attempts in a row blame for a failure that another node may mend, or the doctor; '' for none.

    Two failures in the same step are taken for the run's own: there a user's bug comes back. Not those of the start.

    Args:
        attempts: the newest last.
    """
    host = _blamed(attempts[-1]) if attempts else ""
    if not host or attempts[-1]["failure"]["phase"] == DOCTOR_PHASE:
        return host
    pair = attempts[-2:]
    if len(pair) < 2 or pair[0]["attempt"] + 1 != pair[1]["attempt"] or _blamed(pair[0]) != host:
        return ""
    at_start = any(each["failure"]["phase"] in _OF_THE_START for each in pair)
    return host if at_start or pair[0]["step"] != pair[1]["step"] else ""


def read_faulty_host(output_dir: Path, ended: Entry | None) -> str:
    """As `faulty_host`, behind the attempt that has ended so; '' where its record cannot be read."""
    try:
        attempts = read_attempts(output_dir)
        is_newest = ended is not None and all(attempts[-1][name] == ended.get(name) for name in ("job", "attempt"))
        return faulty_host(attempts) if is_newest else ""
    except (OSError, IndexError, *DAMAGED):
        return ""


def _blamed(attempt: Entry) -> str:
    """The host that its record names; '' where another node would mend nothing."""
    is_of_a_node = attempt["state"] == "failed" and answer_to_end(attempt) is Decision.REPLACE_NODE
    return str(attempt["failure"]["host"]) if is_of_a_node and attempt["failure"] else ""
