"""The format of a run's folder: what its files are called, what stands in them, and how they are read.

For all who read a run, launchers and tools among them: loads nothing but Python. `RunFolder` and `RunHistory` write it,
on global rank 0.
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
COMPLETIONS_FOLDER, TIMELINE_FOLDER = "completions", "timeline"  # and the logs', see `grpo.place.log`
ENDED = ("finished", "stopped", "failed")
"""What a state may be, beside running."""
DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
NOTE_VARIABLE = "GRPO_RUN_NOTE"  # the file that tells a node's launcher where its run is
Entry = dict[str, Any]
"""An attempt of `run.json`, or what `run_state.json` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What `run_state.json` holds: how this attempt stands."""

    state: str
    """running, finished, stopped or failed."""
    why: str
    """For a person: the request, or the failure record."""
    job: str
    """The scheduler's id (GRPO_JOB, SLURM_JOB_ID), or host and pid."""
    attempt: int
    """0 for the first start, 1 after the first requeue …"""
    step: int = 0
    """Optimizer steps that are done."""
    checkpoint: str | None = None
    """The newest complete one."""
    requeue: bool = False
    """Whether the job asks to be started again."""
    kind: FailureKind | None = None
    """Of a failure."""
    nodes: tuple[int, ...] = ()
    """The failure's: those that are silent, as `grpo launch` counts them."""
    restarts: tuple[str, ...] = ()
    """Engines that died in this attempt and came back; the last ones."""
    tracker_run: str = ""
    """The id under which W&B and Trackio go on."""
    started: float = 0.0
    """When the launcher began this attempt, by which it knows it again (GRPO_STARTED)."""


def read_state(folder: Path) -> Entry:
    """The content of `run_state.json`, by any writer; {} where it is not there, or cannot be read now."""
    try:
        return dict(json.loads((folder / STATE_FILE).read_text()))
    except (OSError, *DAMAGED):
        return {}


def read_run_state(folder: Path) -> RunState | None:
    """The last attempt's state; None when there is none that can be read."""
    try:
        return RunState(**read_state(folder))
    except TypeError:
        return None


def read_attempts(folder: Path) -> list[Entry]:
    """The attempts of `run.json`, the newest last, as they stand there. Raises OSError, or one of `DAMAGED`."""
    return list(json.loads((folder / HISTORY_FILE).read_text())["attempts"])


def stop_request(folder: Path, job: str, attempt: int) -> Path:
    """The file by which a launcher asks an attempt to save, to end, and to be started again."""
    return folder / f"stop.{job}.{attempt}"


# -- what ranks tell their node's launcher ----------------------------------------------------------------------------


def note_run(path: Path, env: Mapping[str, str]) -> None:
    """Tell this node's launcher where the run is, if it wants to know. Called by every rank; one writes."""
    if (note := env.get(NOTE_VARIABLE)) and read_launch(env).local_rank == 0:
        write_atomically(Path(note), str(path.absolute()))


def note_failure(env: Mapping[str, str], why: str, kind: FailureKind, **state: Any) -> None:
    """Tell this node's launcher why its ranks end, if it wants to know: rank 0's node may be gone, or its disk full.

    The first failure counts, but one that ends the job counts more.

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
    """Of `run_state.json` what a rank of this node knows of the failure; None where none has failed."""
    try:
        return dict(json.loads(_failure_note(note).read_text()))
    except (OSError, ValueError):
        return None


def _failure_note(note: Path) -> Path:
    return note.with_name(f"{note.name}.failure")


def read_run_note(note: Path) -> Path | None:
    """The output folder that a rank has noted for its launcher; None while there is no trainer."""
    try:
        return Path(note.read_text())
    except OSError:
        return None
