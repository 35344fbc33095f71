"""This attempt of the job, for its launcher: the run's folder, stop requests, and the decision after its end."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.faults.failure import Decision, FailureKind, FailureRecord, answer_to_end
from grpo.ops.launch import next_attempt
from grpo.ops.launch.agent import Ending
from grpo.record.files import ENDED, NOTE_VARIABLE, Entry, read_failure_note, read_run_note, stop_request
from grpo.record.folder import record_early_failure

VISIBLE_S = 180.0  # until rank 0's files on another node are visible here: NFS caches for 60 s
REPORTED_S = 5.0  # the same, if this node's ranks have noted their failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    output_dir: Path | None
    """Folder in the launcher's options; None: only the trainer knows it."""
    notes: Path
    """Folder of this launcher, in which rank 0 notes the run's folder."""
    launched: float
    """`time.time()` at the start of this node's launcher, before the rendezvous. Older requests are ignored."""
    started: float
    """`time.time()` on the head, the same on all nodes."""
    is_head: bool
    env: Mapping[str, str]

    def variables(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        times = {"GRPO_LAUNCHED": repr(self.launched), "GRPO_STARTED": repr(self.started)}
        return {**times, NOTE_VARIABLE: str(self._note)}

    @property
    def _note(self) -> Path:
        return self.notes / "run"

    @property
    def folder(self) -> Path | None:
        """Folder of the run, noted by this node's ranks; None before there is a trainer."""
        return read_run_note(self._note)

    def ask_to_stop(self) -> bool:
        """Write a request to checkpoint, end, and be started again; False if no trainer can read it."""
        state = self._written(wait_s=0.0, states=("running",))
        folder = self.folder or self.output_dir
        if state is None or folder is None:
            return False
        try:
            stop_request(folder, state["job"], state["attempt"]).touch()
        except OSError:
            return False
        return True

    def conclude(self, ending: Ending, *, max_crashes: int) -> tuple[int, str]:
        """Return the exit code, and a line with the reason. On the head it counts a crash."""
        if self.is_hopeless and ending.rank is not None:
            return next_attempt.FAILED, self._about()
        if ending.is_interrupted:
            return next_attempt.INTERRUPTED, "interrupted: what came after the last checkpoint is lost"
        if self.folder is None and ending.has_succeeded:  # there was no trainer, so no state will be written
            return next_attempt.DONE, "the script has ended"
        state = self._state(wait_s=0.0 if self.is_head else VISIBLE_S)
        if state is None and ending.has_succeeded:
            return next_attempt.DONE, "the script has ended, and has not trained"
        if self.folder is None and state is None and ending.is_terminated:
            return next_attempt.START_AGAIN, "ended by a SIGTERM, before there was a trainer"
        folder = self.folder or self.output_dir
        if folder is None:
            return next_attempt.FAILED, "the script has failed, without a trainer"
        job, attempt = _names(self.env, state, self.started)
        code, why = next_attempt.conclude(
            folder,
            state,
            job=job,
            attempt=attempt,
            max_crashes=max_crashes,
            follow=not self.is_head,
            has_failed=not ending.has_succeeded,
            is_terminated=ending.is_terminated,
        )
        newest = next_attempt.newest_checkpoint(folder)
        since = f"checkpoint-{newest}" if newest >= 0 else "the beginning"
        then = f"; the same line with --resume auto goes on from {since}" if code == next_attempt.START_AGAIN else ""
        return code, f"{why}; {folder}{then}"

    @property
    def failed(self) -> Entry | None:
        """Failure noted by this node's ranks; None without one."""
        return read_failure_note(self._note)

    @property
    def is_hopeless(self) -> bool:
        """True if the failure ends the job."""
        return (reported := self.failed) is not None and answer_to_end(reported) is Decision.END

    def _about(self) -> str:
        """Text about the failure. Rank 0 reports its own; another rank's launcher reports its rank's, unless rank 0 has
        one too."""
        reported = self.failed or {}
        written = self._written(wait_s=0.0 if self.is_head else REPORTED_S)
        if not reported.get("rank") or (written is not None and answer_to_end(written) is Decision.END):
            return "not started again: this would fail again"
        return f"rank {reported['rank']}: {reported['why']}"

    def _state(self, *, wait_s: float) -> Entry | None:
        reported = self.failed
        written = self._written(wait_s=wait_s if reported is None else min(wait_s, REPORTED_S))
        return written or reported  # rank 0's state has more, such as stop requests, if it and its disk are there

    def _written(self, *, wait_s: float, states: Sequence[str] = ENDED) -> Entry | None:
        folder = self.folder or self.output_dir
        if folder is None:
            return None
        return next_attempt.read_state(
            folder, lambda state: state.get("started") == self.started, states=states, wait_s=wait_s
        )


def record_no_start(
    output_dir: Path,
    env: Mapping[str, str],
    why: str,
    kind: FailureKind,
    failure: FailureRecord | None = None,
    *,
    max_crashes: int,
) -> int:
    """Record in `run_state.json` that this attempt did not reach its launcher; returns the exit code.

    Args:
        failure: for `run.json`, if a single node failed.
    """
    started = time.time()
    record_early_failure(output_dir, {**env, "GRPO_STARTED": repr(started)}, why, kind, failure)
    state = next_attempt.read_state(output_dir, lambda state: state.get("started") == started)
    job, attempt = _names(env, state, started)
    code, _ = next_attempt.conclude(output_dir, state, job=job, attempt=attempt, max_crashes=max_crashes)
    return code


def _names(env: Mapping[str, str], state: Entry | None, started: float) -> tuple[str, str]:
    """Names of the job and this attempt in the count of crashes."""
    job = env.get("GRPO_JOB") or env.get("SLURM_JOB_ID") or socket.gethostname()  # the same at every start
    attempt = env.get("GRPO_ATTEMPT") or env.get("SLURM_RESTART_COUNT") or (state and state.get("attempt"))
    return job, str(started if attempt in (None, "") else attempt)
