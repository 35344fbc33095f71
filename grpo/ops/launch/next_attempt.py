"""Decision after an attempt has ended: done, start again, or a failure that a restart cannot fix.

    python -m grpo.ops.launch.next_attempt OUTPUT_DIR --job 17 --attempt 0 --max_crashes 3

Reads rank 0's OUTPUT_DIR/run_state.json, prints one line and exits with

    0    finished, or stopped by a person
    85   start again: training resumes from the newest complete checkpoint
    1    failed, and a restart would not help; or, with --failed, finished and failed afterwards

An attempt without a recorded end has crashed; a restart may fix that. Crashes are counted in
OUTPUT_DIR/crashes.JOB.json while no newer checkpoint is completed, once per attempt: a second call gets the same
answer. Standard library only.
"""

import argparse
import contextlib
import errno
import glob
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo.checkpoints.checkpoints import COMPLETE_FILE, checkpoints, step_of
from grpo.faults.failure import Decision, answer_to_end
from grpo.ops.launch.faulty_host import read_faulty_host
from grpo.record import files
from grpo.record.files import ENDED, Entry

DONE, FAILED, START_AGAIN = 0, 1, 85
INTERRUPTED = 130  # by a person at the launcher, as in shells

_NEVER_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def read_state(
    output_dir: Path, is_own: Callable[[Entry], bool], *, states: Sequence[str] = ENDED, wait_s: float = 0.0
) -> Entry | None:
    """Return the end of an attempt as recorded by its rank 0; None if not within `wait_s`.

    Args:
        is_own: returns True for this attempt's state.
        states: to wait for.
    """
    deadline = time.monotonic() + wait_s
    while True:
        state = files.read_state(output_dir)
        if is_own(state) and state.get("state") in states:
            return state
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.5)


def newest_checkpoint(output_dir: Path) -> int:
    """Step of the newest complete checkpoint; -1 without one."""
    return next((step_of(folder) for folder in checkpoints(output_dir) if (folder / COMPLETE_FILE).exists()), -1)


def count_crash(record: Path, newest: int, attempt: str, *, limit: int) -> int:
    """Count crashes in a row, this attempt's included, without a newer complete checkpoint in between; `limit` if they
    cannot be counted, now or later: such a job would restart forever."""
    before: Entry = {"crashes": 0, "checkpoint": -1, "attempt": None}
    with contextlib.suppress(OSError, ValueError):  # none; or empty, after a power failure
        before |= json.loads(record.read_text())
    if before["attempt"] == attempt:
        return int(before["crashes"])
    crashes = 0 if newest > before["checkpoint"] else before["crashes"] + 1
    try:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # of an attempt that died before it had a folder
        written = record.with_suffix(".new")
        written.write_text(json.dumps({"crashes": crashes, "checkpoint": newest, "attempt": attempt}) + "\n")
        written.replace(record)
    except OSError as error:
        print(f"this crash cannot be counted in {record}: {error}", file=sys.stderr, flush=True)
        if error.errno in _NEVER_WRITABLE:
            return limit
        if error.errno in _FULL:  # which may be the very reason of the failure, and may end
            return _count_by_name(record, newest, attempt, crashes, limit=limit)
    return crashes


def _count_by_name(record: Path, newest: int, attempt: str, crashes: int, *, limit: int) -> int:
    """Count `crashes` including earlier ones for which a full disk allowed only an empty file's name."""
    name = f"{record.name}.full.{newest}."
    try:
        (record.parent / f"{name}{attempt}").touch()
    except OSError:
        return limit
    return crashes - 1 + len(list(record.parent.glob(f"{glob.escape(name)}*")))


def _forget_crashes(record: Path) -> None:
    with contextlib.suppress(OSError):
        for path in (record, *record.parent.glob(f"{glob.escape(record.name)}.full.*")):
            path.unlink(missing_ok=True)


def conclude(
    output_dir: Path,
    state: Entry | None,
    *,
    job: str,
    attempt: str,
    max_crashes: int,
    follow: bool = False,
    has_failed: bool = False,
    is_terminated: bool = False,
) -> tuple[int, str]:
    """Return the exit code, and the reason.

    Args:
        state: the attempt's recorded end.
        attempt: its name within the job.
        follow: another node counts the crashes: start again after any.
        has_failed: a launcher has ended with an error.
        is_terminated: it was a SIGTERM.
    """
    record = output_dir / f"crashes.{job}.json"
    crashes, newest = 0, newest_checkpoint(output_dir)
    is_crash = state is None or (state["state"] == "failed" and answer_to_end(state) is not Decision.REQUEUE)
    if not follow and is_crash:
        crashes = count_crash(record, newest, attempt, limit=max_crashes)
    elif not follow:
        _forget_crashes(record)
    # A job's first crash counts as 1, and as 0 if a checkpoint is complete that no crash before has seen.
    answer = answer_to_end(state, was_seen=crashes > (newest < 0))
    code, why = decide(state, answer, crashes, max_crashes, has_failed=has_failed, is_terminated=is_terminated)
    if host := read_faulty_host(output_dir, state):
        why += f"; take {host} out of the job: grpo doctor, or two attempts in a row, have failed on it"
    return code, why


def decide(
    state: Entry | None,
    answer: Decision,
    crashes: int,
    max_crashes: int,
    *,
    has_failed: bool = False,
    is_terminated: bool = False,
) -> tuple[int, str]:
    """Return the exit code, and the reason. `crashes` includes this attempt, if it crashed; the flags are its
    launcher's end."""
    if state is None:
        how = "died without a word"
    else:
        why, step = state.get("why") or "no reason given", state.get("step")
        match state:
            case {"state": "finished"} if is_terminated:  # for example while the script saved its model
                return START_AGAIN, "training has finished, but a SIGTERM has ended the script after it"
            case {"state": "finished"} if has_failed:
                return FAILED, "training has finished, but the script failed after it"
            case {"state": "finished"}:
                return DONE, "training has finished"
            case {"state": "stopped", "requeue": True}:
                return START_AGAIN, f"stopped after step {step} to go on later: {why}"
            case {"state": "stopped"}:
                return DONE, f"stopped after step {step}: {why}"
        if answer is Decision.END:
            return FAILED, f"failed ({state.get('kind')}), and starting again would not help: {why}"
        how = f"failed: {why}"
    counted = f"crash {crashes} of {max_crashes} in a row without a newer complete checkpoint [GRPO-710]"
    if crashes >= max_crashes:
        return FAILED, f"{how} ({counted})"
    return START_AGAIN, f"{how} ({counted})" if crashes else how


def parser_for(description: str) -> argparse.ArgumentParser:
    """Make the parser of a program whose arguments name an attempt."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--job", required=True, help="GRPO_JOB of the attempt")
    parser.add_argument("--attempt", required=True, type=int, help="GRPO_ATTEMPT of the attempt")
    return parser


def read_end(args: argparse.Namespace) -> Entry | None:
    """Return the end of the attempt named by the arguments; None until then."""
    name = (args.job, str(args.attempt))
    return read_state(args.output_dir, lambda state: (str(state.get("job")), str(state.get("attempt"))) == name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--failed", action="store_true", help="a node's launcher has ended with an error")
    parser.add_argument("--max_crashes", type=int, default=3, help="crashes in a row without a newer checkpoint")
    args = parser.parse_args(argv)
    code, why = conclude(
        args.output_dir,
        read_end(args),
        job=args.job,
        attempt=str(args.attempt),
        max_crashes=args.max_crashes,
        has_failed=args.failed,
    )
    print(f"job {args.job}, attempt {args.attempt}: {why}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
