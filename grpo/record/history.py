"""`run.json`: settings and result of every attempt of a run. docs/metrics.md documents its fields.

Written by the holder of the run's folder. Failure to write is warned of once, and does not fail the job.
"""

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from grpo.record.durable import write_atomically
from grpo.record.files import DAMAGED, HISTORY_FILE, METRICS_FILE, STATE_FILE, Entry, read_attempts
from grpo.record.provenance import provenance

TAIL_BYTES = 2**18
WITHOUT_A_WORD = "ended without a word"
WITHOUT_TRAINING = "the script ended without training"
FOLLOWED = ("state", "why", "kind", "nodes", "step", "restarts")
"""Fields copied from the run's state at each of its changes."""
_WRITTEN = (METRICS_FILE, STATE_FILE, HISTORY_FILE)  # written by an attempt while it lived


class RunHistory:
    """Attempts of the run in `folder`; this process may be the newest. For one thread at a time."""

    _begun: ClassVar[dict[Path, tuple[int, float]]] = {}
    """Last attempt begun by this process, by folder: its number and its start."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY_FILE
        self._folder = folder.absolute()
        self._pid = os.getpid()
        self._attempts: list[Entry] = []
        self._own: Entry | None = None
        self._has_warned = False

    def next_attempt(self) -> int:
        """Return the next attempt's number: one more than the largest of other processes; 0 for the first."""
        begun = self._begun.get(self._folder)
        try:
            attempts = self._read()
        except (OSError, *DAMAGED):
            return 0
        return max((each["attempt"] for each in attempts if _key(each) != begun), default=-1) + 1

    def begin(self, state: Mapping[str, Any], settings: Mapping[str, Any], *, goes_on: bool) -> None:
        """Add this process's attempt. Other attempts still marked running were killed, since the lock excludes other
        jobs.

        Args:
            state: the run's, at the attempt's start.
            settings: the attempt's `arguments`, `changed` and `topology`.
            goes_on: continue the attempt this process has begun already, if any.
        """
        try:
            self._attempts = self._read_or_quarantine()
        except OSError as error:
            self._warn(f"cannot read {self.path}: {error}; this attempt is not in it")
            return
        begun = self._begun.get(self._folder)
        own = next((each for each in self._attempts if _key(each) == begun), None)
        for each in self._attempts:
            if each["state"] == "running" and each is not own:
                self._mark_silent(each)
        if own is not None and not goes_on:
            if own["state"] == "running":
                own.update(state="finished", why=WITHOUT_TRAINING, ended=time.time())
            own = None
        if own is None:
            own = {name: state[name] for name in ("attempt", "job", "started", *FOLLOWED)}
            own |= {"ended": None, "from_step": 0, "failure": None, **provenance(), **settings}
            if any(each["started"] == own["started"] for each in self._attempts):
                own["started"] = time.time()  # a second trainer of a process, or a rank restarted by torchrun
            self._attempts.append(own)
        self._own = own
        self._begun[self._folder] = _key(own)
        self._write(own)

    def follow(
        self, state: Mapping[str, Any], *, from_step: int | None = None, failure: Mapping[str, Any] | None = None
    ) -> None:
        """Copy the run's state into the attempt; has no effect before `begin`.

        Args:
            from_step: first step of an attempt that begins to train.
            failure: the job's record; the first one is kept.
        """
        own = self._own
        if own is None:
            return
        was = own["state"]
        own.update({name: state[name] for name in FOLLOWED})
        if own["state"] == "running":
            own["ended"] = None
            own["failure"] = None
        elif own["state"] != was or own["ended"] is None:
            own["ended"] = time.time()
        if from_step is not None:
            own["from_step"] = from_step
        if failure is not None and own["failure"] is None and own["state"] == "failed":
            own["failure"] = dict(failure)
        self._write(own)

    def close(self) -> None:
        """End a running attempt as this process leaves the folder: failed if an exception is being raised, else
        finished."""
        own, self._own = self._own, None
        if own is None or own["state"] != "running" or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError, *DAMAGED):
            if any(each["state"] != "running" for each in self._read() if _key(each) == _key(own)):
                return  # `record_early_failure` has recorded it
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        own["state"] = "failed" if has_failed else "finished"
        own["why"] = f"{type(error).__name__}: {error}" if has_failed else WITHOUT_TRAINING
        own["ended"] = time.time()
        self._write(own)

    # -- the file -------------------------------------------------------------------------------------------------

    def _read(self) -> list[Entry]:
        """Read the attempts. Raises one of `DAMAGED`, or OSError."""
        try:
            attempts = read_attempts(self.path.parent)
        except FileNotFoundError:
            return []
        for each in attempts:
            _key(each), each["state"].strip(), each["step"] + 0
        return attempts

    def _read_or_quarantine(self) -> list[Entry]:
        try:
            return self._read()
        except DAMAGED as problem:
            number = 1
            while (aside := self.path.with_name(f"run.damaged-{number}.json")).exists():
                number += 1
            self.path.rename(aside)
            self._warn(f"{self.path} is damaged ({type(problem).__name__}: {problem}): begun anew; it is now {aside}")
            return []

    def _write(self, own: Entry) -> None:
        """Write `own` into the attempts now in the file: `record_early_failure` may have changed it."""
        with contextlib.suppress(OSError, *DAMAGED):
            there = self._read()
            if any(_key(each) == _key(own) for each in there):
                self._attempts = [own if _key(each) == _key(own) else each for each in there]
        try:
            write_atomically(self.path, json.dumps({"attempts": self._attempts}, indent=1))
        except OSError as error:  # a full disk may be the very cause the caller is recording
            if not self._has_warned:
                self._warn(f"cannot write {self.path}: {error}")
            self._has_warned = True

    def _warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=4)

    def _mark_silent(self, entry: Entry) -> None:
        """Mark an attempt whose process was killed as failed, with the time of its last write and its last logged
        step."""
        entry.update(state="failed", why=WITHOUT_A_WORD)
        times = [entry["started"]]
        for name in _WRITTEN:
            with contextlib.suppress(OSError):
                times.append((self._folder / name).stat().st_mtime)
        entry["ended"] = max(times)
        line = _last_line(self._folder / METRICS_FILE)
        if line.get("attempt") == entry["attempt"]:
            entry["step"] = max(entry["step"], line.get("step", 0))


def _key(entry: Entry) -> tuple[int, float]:
    return int(entry["attempt"]), float(entry["started"])


def _last_line(path: Path) -> dict[str, Any]:
    """Return the last complete line; {} if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                if isinstance(reported := json.loads(line), dict):
                    return reported
    return {}
