"""The output folder, shared by the attempts of a run: its lock, the state of the last attempt, stop requests.

Only global rank 0 reads and writes here, and informs the other ranks. Scripts in `launch/` read `run_state.json`,
because torchrun and accelerate do not pass on a worker's exit code.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from grpo.faults.failure import FailureKind, FailureRecord
from grpo.faults.signals import StopRequest
from grpo.place.timeouts import USUAL, Timeouts
from grpo.record.durable import write_atomically
from grpo.record.files import METRICS_FILE, STATE_FILE, RunState, read_run_state, stop_request
from grpo.record.history import RunHistory

LOCK_FILE = "_run.lock"  # transformers does not upload names that begin so: reading the file would release the lock


def _is_taken(lock: IO[str]) -> bool:
    """True if the lock is ours now."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def make_run_folder(path: Path) -> None:
    """Create the folder if missing, readable by its owner only: it holds prompts, completions, and arguments with
    tokens."""
    path.mkdir(parents=True, mode=0o700, exist_ok=True)


class RunFolder:
    """`output_dir`, locked by one job.

    Raises:
        ValueError: another job holds it.
    """

    def __init__(self, path: Path, env: Mapping[str, str], timeouts: Timeouts = USUAL) -> None:
        self.path = path
        check_writable(path)
        make_run_folder(path)
        started = float(env.get("GRPO_STARTED") or time.time())
        # before the rendezvous of the nodes, which takes minutes
        self._launched = float(env.get("GRPO_LAUNCHED") or started)
        self._updating = threading.Lock()
        self.job = env.get("GRPO_JOB") or env.get("SLURM_JOB_ID") or f"{socket.gethostname()}-{os.getpid()}"
        self._lock = self._take_lock(timeouts.run_lock_s)
        previous = read_run_state(path)
        self.previous_attempt = previous.attempt if previous else 0
        self._history = RunHistory(path)
        given = env.get("GRPO_ATTEMPT") or env.get("SLURM_RESTART_COUNT")
        following = max(previous.attempt + 1 if previous else 0, self._history.next_attempt())
        self.attempt = int(given) if given else following
        self.state = RunState(
            state="running",
            why="",
            job=self.job,
            attempt=self.attempt,
            tracker_run=previous.tracker_run if previous else "",
            started=started,
        )
        self._own_request = stop_request(path, self.job, self.attempt)
        self._person_request = path / "stop"

    def _take_lock(self, timeout_s: float) -> IO[str] | None:
        # The kernel releases it with this process, however that ends; a file with "running" would remain.
        path = self.path / LOCK_FILE
        lock = path.open("a+")
        deadline = time.monotonic() + timeout_s
        try:
            while not _is_taken(lock):
                lock.seek(0)
                owner = lock.read().strip() or "unknown"
                is_ours = owner.startswith(f"{self.job} (pid ") and not owner.endswith(f" on {socket.gethostname()})")
                if not is_ours:
                    raise ValueError(
                        f"output_dir {self.path} is in use by job {owner} [GRPO-207]: two jobs would overwrite each "
                        "other's checkpoints; end that job, or set another output_dir"
                    )
                if time.monotonic() > deadline:  # perhaps the attempt before, on a node that is off or does not answer
                    raise TimeoutError(f"{self.path} is still held by this job's attempt before: {owner}")
                time.sleep(0.5)
        except (ValueError, TimeoutError):
            lock.close()
            raise
        except OSError as error:
            lock.close()
            what = f"{path} cannot be locked ({error}), a second job here would go unnoticed [GRPO-209]"
            warnings.warn(what, stacklevel=2)
            return None
        lock.truncate(0)
        lock.write(f"{self.job} (pid {os.getpid()} on {socket.gethostname()})")
        lock.flush()
        return lock

    def release(self) -> None:
        """Release the lock for another job. Safe to call twice."""
        with self._updating:
            self._history.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- the state ------------------------------------------------------------------------------------------------

    def begin_attempt(
        self,
        arguments: Mapping[str, Any] = {},
        topology: Mapping[str, Any] = {},
        *,
        changed: Sequence[str] = (),
        goes_on: bool = False,
    ) -> None:
        """Add this attempt to `run.json`, which follows the state from now on. Calls git: may take `GIT_S`.

        Args:
            changed: names of arguments with other values than their defaults.
            goes_on: continue the attempt this process has begun already, if any.
        """
        with self._updating:
            weakref.finalize(self, self._history.close)  # with this object, or the process, unless released before
            settings = {"arguments": dict(arguments), "changed": list(changed), "topology": dict(topology)}
            self._history.begin(asdict(self.state), settings, goes_on=goes_on)

    def update(self, *, from_step: int | None = None, failure: FailureRecord | None = None, **changes: Any) -> None:
        """Change fields of the state, and write it to `run_state.json` and `run.json`. From any thread.

        The first failure is kept, and a stopped attempt does not become a failed one; only another start changes
        either.

        Args:
            from_step: first step of an attempt that begins to train.
            failure: the job's record, for `run.json`; may come after a failure this rank has recorded by itself.
        """
        with self._updating:
            over = {"failed"} if changes.get("state") != "failed" else {"failed", "stopped"}
            is_over = self.state.state in over and changes.get("state") != "running"
            try:
                if not is_over:
                    self.state = replace(self.state, **changes)
                    write_atomically(self.path / STATE_FILE, json.dumps(asdict(self.state), indent=1))
            finally:
                if not is_over or failure is not None:
                    record = None if failure is None else failure.as_dict()
                    self._history.follow(asdict(self.state), from_step=from_step, failure=record)

    def tracker_run(self, *, resumed: bool) -> str:
        """Run id for W&B and Trackio: the last attempt's if this one resumes it."""
        if not resumed or not self.state.tracker_run:
            self.state = replace(self.state, tracker_run=uuid.uuid4().hex[:8])
        return self.state.tracker_run

    # -- requests -------------------------------------------------------------------------------------------------

    def drop_old_requests(self) -> list[str]:
        """Remove requests meant for an earlier attempt; return a line about each."""
        notes = []
        for path in [self._person_request, *self.path.glob("stop.*.*")]:
            try:
                too_old = path.stat().st_mtime < self._launched
            except OSError:
                continue
            if path != self._own_request and (too_old or path != self._person_request):
                path.unlink(missing_ok=True)
                notes.append(f"{path} was left for an earlier attempt: ignored and removed")
        return notes

    def stop_request(self) -> StopRequest | None:
        """Return the stop request of a file, if any. Two stats: cheap enough for every step."""
        for path, requeue in ((self._person_request, False), (self._own_request, True)):
            with contextlib.suppress(OSError):  # a file system that does not answer requests nothing
                if path.exists():
                    return StopRequest(why=f"{path} was written", requeue=requeue)
        return None

    @property
    def a_person_asks(self) -> bool:
        """True if a person wants the run to end; overrides a scheduler's request."""
        return self._person_request.exists()

    def answer_requests(self) -> None:
        """Remove the requests: they are done."""
        self._person_request.unlink(missing_ok=True)
        self._own_request.unlink(missing_ok=True)

    # -- metrics --------------------------------------------------------------------------------------------------

    def cut_metrics(self, step: int) -> None:
        """Keep the lines of `metrics.jsonl` up to `step`; later ones go to `metrics.attempt-<k>.jsonl`."""
        path = self.path / METRICS_FILE
        kept: list[str] = []
        dropped: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            for line in path.read_text().splitlines(keepends=True):
                try:
                    is_kept = json.loads(line)["step"] <= step and step > 0
                except (ValueError, KeyError, TypeError):  # a line cut off when its writer was killed
                    is_kept = False
                (kept if is_kept else dropped).append(line)
        if dropped:
            with (self.path / f"metrics.attempt-{self.previous_attempt}.jsonl").open("a") as lines:
                lines.writelines(dropped)
        write_atomically(path, "".join(kept))


def check_writable(path: Path) -> None:
    """Check that a run can write into the folder, which need not exist yet. Leaves nothing behind.

    Raises:
        ValueError: has the obstacle.
    """
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise ValueError(f"output_dir {path} cannot be written: {existing} is no folder; set another output_dir")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        why = f"{existing}: {error.strerror}"
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTSUP):
            raise
        raise ValueError(
            f"output_dir {path} cannot be written ({why}): set one on a disk that you may write to"
        ) from None


def record_early_failure(
    path: Path, env: Mapping[str, str], why: str, kind: FailureKind, failure: FailureRecord | None = None
) -> None:
    """Record in `run_state.json` and `run.json` that this attempt failed before there was a trainer."""
    try:
        folder = RunFolder(path, env)
    except (OSError, ValueError):  # no folder, or another job's
        return
    previous = read_run_state(path)
    # A scheduler's job keeps its name over its attempts; otherwise the name contains this process's pid.
    named = env.get("GRPO_JOB") or env.get("SLURM_JOB_ID")
    is_reported = (
        previous is not None
        and (previous.state, previous.job) == ("failed", folder.job)
        and (not named or previous.attempt == folder.attempt or previous.started == folder.state.started)
    )
    try:
        if not is_reported:  # else the trainer has recorded more
            folder.begin_attempt(goes_on=True)
            folder.update(state="failed", why=why, kind=kind, failure=failure)
    except OSError as problem:  # a full disk must not hide the failure
        warnings.warn(f"cannot write {path / STATE_FILE}: {problem}", stacklevel=2)
    finally:
        folder.release()
