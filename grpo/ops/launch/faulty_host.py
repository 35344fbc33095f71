"""Choice of a host to replace, from the last two attempts in `run.json`. Standard library only."""

from collections.abc import Sequence
from pathlib import Path

from grpo.faults.failure import Decision, answer_to_end
from grpo.record.files import DAMAGED, Entry, read_attempts

DOCTOR_PHASE = "doctor"
_OF_THE_START = frozenset(("start", "process groups", "engine start"))  # no data of a step is involved yet


def faulty_host(attempts: Sequence[Entry]) -> str:
    """Host blamed by the doctor, or by two attempts in a row for a failure another node may fix; '' for none.

    Two failures in the same step count as the run's own: a user's bug recurs there. Failures at the start are exempt.

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
    """Apply `faulty_host` after the attempt that ended with `ended`; '' if its record cannot be read."""
    try:
        attempts = read_attempts(output_dir)
        is_newest = ended is not None and all(attempts[-1][name] == ended.get(name) for name in ("job", "attempt"))
        return faulty_host(attempts) if is_newest else ""
    except (OSError, IndexError, *DAMAGED):
        return ""


def _blamed(attempt: Entry) -> str:
    """Host named by the record; '' if another node would not help."""
    is_of_a_node = attempt["state"] == "failed" and answer_to_end(attempt) is Decision.REPLACE_NODE
    return str(attempt["failure"]["host"]) if is_of_a_node and attempt["failure"] else ""
