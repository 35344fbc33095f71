"""Failures of a run: records, ends of logs, and matching entries of docs/troubleshooting.md."""

import os
from dataclasses import dataclass
from pathlib import Path

from grpo.faults.failure import Decision, answer_to
from grpo.ops.report.reading import AttemptRecord, Run, attempt_of_log
from grpo.ops.report.symptoms import Symptom, matching
from grpo.place.log import LOGS_FOLDER

TAIL_BYTES = 16_384
TAIL_LINES = 40
MAX_CAUSE_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """End of a log file."""

    name: str
    lines: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt."""

    attempt: AttemptRecord
    cause: str
    tails: tuple[Tail, ...]
    symptoms: tuple[Symptom, ...]
    went_on: bool
    """True if another attempt follows."""

    @property
    def ends_job(self) -> bool:
        """True if a new start would fail in the same way."""
        failed, attempt = self.attempt.failure, self.attempt
        kind = None if failed is None else failed.kind
        return answer_to(kind, is_behind_first_step=attempt.step > 0) is Decision.END


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """An engine that died and was restarted."""

    attempt: int
    text: str
    symptoms: tuple[Symptom, ...]


def failures_of(run: Run) -> list[Failure]:
    """Return the failed attempts, newest first."""
    found = []
    for number, attempt in enumerate(run.attempts):
        if attempt.failure is None and attempt.state != "failed":
            continue
        cause = attempt.failure.cause if attempt.failure else attempt.why
        tails = tails_of(run.folder, attempt)
        texts = [cause, attempt.why, *(each.lines for each in tails)]
        found.append(
            Failure(
                attempt=attempt,
                cause=shortened(cause),
                tails=tails,
                symptoms=tuple(matching(texts)),
                went_on=number + 1 < len(run.attempts),
            )
        )
    if not found and run.state == "failed":  # before the first attempt was written into run.json
        lone = AttemptRecord(attempt=0, state="failed", why=run.why)
        tails = tails_of(run.folder, lone)
        found.append(
            Failure(
                attempt=lone,
                cause=shortened(run.why),
                tails=tails,
                symptoms=tuple(matching([run.why])),
                went_on=False,
            )
        )
    return found[::-1]


def deaths_of(run: Run) -> list[Death]:
    return [
        Death(attempt=attempt.attempt, text=shortened(text), symptoms=tuple(matching([text])))
        for attempt in run.attempts
        for text in attempt.restarts
    ]


def shortened(text: str) -> str:
    """Shorten a text of many lines to its beginning and end."""
    lines = text.strip().splitlines()
    if len(lines) <= MAX_CAUSE_LINES:
        return "\n".join(lines)
    half = MAX_CAUSE_LINES // 2
    return "\n".join([*lines[:half], f"[… {len(lines) - 2 * half} lines]", *lines[-half:]])


def tails_of(folder: Path, attempt: AttemptRecord) -> tuple[Tail, ...]:
    """Return the ends of the attempt's engine logs on the failed node; of all nodes if it is unknown or has no logs."""
    logs = {path: found for path in (folder / LOGS_FOLDER).glob("engine-*.log") if (found := attempt_of_log(path))}
    of_attempt = [path for path, (_, number) in logs.items() if number == attempt.attempt]
    node = attempt.failure.node if attempt.failure else None
    chosen = [path for path in of_attempt if logs[path][0] == node] or of_attempt
    tails = ((path, tail_of(path)) for path in sorted(chosen)[:4])
    return tuple(Tail(name=f"{LOGS_FOLDER}/{path.name}", lines=lines) for path, lines in tails if lines)


def tail_of(path: Path) -> str:
    """Return the last lines; '' if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])
