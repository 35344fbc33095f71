"""Format of a run's folder: names of its files, their contents, and readers.

For all readers of a run, including launchers and tools: uses only the standard library. `RunFolder` and `RunHistory`
write it, on global rank 0.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.faults.failure import Decision, FailureKind, answer_to_end
from grpo.place.launch import read_launch
from grpo.record.durable import write_atomically

STATE_FILE, HISTORY_FILE, METRICS_FILE = "run_state.json", "run.json", "metrics.jsonl"
COMPLETIONS_FOLDER, TIMELINE_FOLDER = "completions", "timeline"  # the logs' folder: see `grpo.place.log`
ENDED = ("finished", "stopped", "failed")
"""Final states of an attempt."""
DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
NOTE_VARIABLE = "GRPO_RUN_NOTE"  # file in which ranks report the run's folder to their node's launcher
Entry = dict[str, Any]
"""An attempt of `run.json`, or the content of `run_state.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Content of `run_state.json`: the state of the current attempt.

    Example:
        RunState(state="stopped", why="got SIGUSR1", job="4711", attempt=1, step=120, checkpoint="out/checkpoint-120",
                 requeue=True)
    """

    state: str
    """One of: running, finished, stopped, failed."""
    why: str
    """Text for the user: the request, or the failure record."""
    job: str
    """Id from the scheduler (GRPO_JOB, SLURM_JOB_ID), or host and pid."""
    attempt: int
    """0 for the first start, 1 after the first requeue …"""
    step: int = 0
    """Finished optimizer steps."""
    checkpoint: str | None = None
    """Newest complete checkpoint."""
    requeue: bool = False
    """True if the job requests another start."""
    kind: FailureKind | None = None
    """Kind of a failure."""
    nodes: tuple[int, ...] = ()
    """Silent nodes of a failure, by `grpo launch`'s numbers."""
    restarts: tuple[str, ...] = ()
    """Restarted engines of this attempt; the last ones."""
    tracker_run: str = ""
    """Run id for W&B and Trackio."""
    started: float = 0.0
    """Time at which the launcher started this attempt (GRPO_STARTED); identifies the attempt."""


def read_state(folder: Path) -> Entry:
    """Return the content of `run_state.json`, by any writer; {} if it is missing or unreadable."""
    try:
        return dict(json.loads((folder / STATE_FILE).read_text()))
    except (OSError, *DAMAGED):
        return {}


def read_run_state(folder: Path) -> RunState | None:
    """Return the last attempt's state; None if it is missing or unreadable."""
    try:
        return RunState(**read_state(folder))
    except TypeError:
        return None


def read_attempts(folder: Path) -> list[Entry]:
    """Return the attempts of `run.json`, the newest last. Raises OSError, or one of `DAMAGED`."""
    return list(json.loads((folder / HISTORY_FILE).read_text())["attempts"])


def stop_request(folder: Path, job: str, attempt: int) -> Path:
    """File by which a launcher asks an attempt to save, end, and be started again."""
    return folder / f"stop.{job}.{attempt}"


# -- notes from ranks to their node's launcher ------------------------------------------------------------------------


def note_run(path: Path, env: Mapping[str, str]) -> None:
    """Note the run's folder for this node's launcher, if it asks for it. Called by every rank; one writes."""
    if (note := env.get(NOTE_VARIABLE)) and read_launch(env).local_rank == 0:
        write_atomically(Path(note), str(path.absolute()))


def note_failure(env: Mapping[str, str], why: str, kind: FailureKind, **state: Any) -> None:
    """Note for this node's launcher, if it asks for it, why its ranks end: rank 0's node may be gone, or its disk full.

    The first failure is kept, unless a later one ends the job.

    Args:
        state: other fields of `run_state.json`.
    """
    if not (note := env.get(NOTE_VARIABLE)):
        return
    failed = {"state": "failed", "why": why, "kind": kind, "rank": int(env.get("RANK") or 0), **state}
    if read_failure_note(Path(note)) is None or answer_to_end(failed) is Decision.END:
        with contextlib.suppress(OSError):  # it must not hide the failure
            write_atomically(_failure_note(Path(note)), json.dumps(failed))


def read_failure_note(note: Path) -> dict[str, Any] | None:
    """The failure as noted by this node's ranks (a subset of `run_state.json`), or None."""
    try:
        return dict(json.loads(_failure_note(note).read_text()))
    except (OSError, ValueError):
        return None


def _failure_note(note: Path) -> Path:
    return note.with_name(f"{note.name}.failure")


def read_run_note(note: Path) -> Path | None:
    """Output folder noted by a rank for its launcher; None before there is a trainer."""
    try:
        return Path(note.read_text())
    except OSError:
        return None
