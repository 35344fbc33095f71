"""What follows an attempt that has ended: nothing, another attempt, or a failure that another attempt cannot mend.

    python launch/next_attempt.py OUTPUT_DIR --job 17 --attempt 0 --max_crashes 3

Reads what rank 0 has left in OUTPUT_DIR/run_state.json, prints one line and exits with

    0    it has finished, or a person has stopped it
    85   start again: training resumes from the newest complete checkpoint
    1    it has failed, and starting again would not help

An attempt that did not say how it ended has died without a word; that is a crash which another attempt may mend.
Crashes are counted in OUTPUT_DIR/crashes.JOB.json while no newer checkpoint is completed. Needs nothing but Python.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DONE, FAILED, START_AGAIN = 0, 1, 85


def read_state(output_dir: Path, job: str, attempt: int, *, wait_s: float = 0.0) -> dict[str, Any] | None:
    """How this attempt's rank 0 said that it ended; None if it has not said so within `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            state = json.loads((output_dir / "run_state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            state = {}
        is_its_own = (str(state.get("job")), str(state.get("attempt"))) == (job, str(attempt))
        if is_its_own and state.get("state") in ("finished", "stopped", "failed"):
            return state
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.5)


def newest_checkpoint(output_dir: Path) -> int:
    """Step of the newest complete checkpoint; -1 without one."""
    found = [re.fullmatch(r"checkpoint-(\d+)", path.parent.name) for path in output_dir.glob("*/complete.json")]
    return max((int(match[1]) for match in found if match), default=-1)


def count_crash(record: Path, newest: int) -> int:
    """Crashes in a row, this one included, none of which has completed a checkpoint newer than the one before."""
    before = json.loads(record.read_text()) if record.exists() else {"crashes": 0, "checkpoint": -1}
    crashes = 0 if newest > before["checkpoint"] else before["crashes"] + 1
    written = record.with_suffix(".new")
    written.write_text(json.dumps({"crashes": crashes, "checkpoint": newest}) + "\n")
    written.replace(record)
    return crashes


def decide(state: dict[str, Any] | None, crashes: int, max_crashes: int) -> tuple[int, str]:
    """The exit code, and why. `crashes` counts this attempt, if it was one."""
    if state is None:
        how = "died without a word"
    else:
        why, step = state.get("why") or "no reason given", state.get("step")
        match state:
            case {"state": "finished"}:
                return DONE, "training has finished"
            case {"state": "stopped", "requeue": True}:
                return START_AGAIN, f"stopped after step {step} to go on later: {why}"
            case {"state": "stopped"}:
                return DONE, f"stopped after step {step}: {why}"
            case {"can_heal": False}:
                return FAILED, f"failed, and starting again would not help: {why}"
        how = f"failed: {why}"
    counted = f"crash {crashes} of {max_crashes} in a row without a newer complete checkpoint"
    if crashes >= max_crashes:
        return FAILED, f"{how} ({counted})"
    return START_AGAIN, f"{how} ({counted})" if crashes else how


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--job", required=True, help="GRPO_JOB of the attempt")
    parser.add_argument("--attempt", required=True, type=int, help="GRPO_ATTEMPT of the attempt")
    parser.add_argument("--max_crashes", type=int, default=3, help="crashes in a row without a newer checkpoint")
    parser.add_argument("--follow", action="store_true", help="another node counts the crashes: start again after any")
    parser.add_argument("--wait_s", type=float, default=0.0, help="for the state to appear on a shared file system")
    args = parser.parse_args(argv)
    state = read_state(args.output_dir, args.job, args.attempt, wait_s=args.wait_s)
    crashed = state is None or state["state"] == "failed"
    record = args.output_dir / f"crashes.{args.job}.json"
    if args.follow:
        crashes = 0
    elif crashed:
        crashes = count_crash(record, newest_checkpoint(args.output_dir))
    else:
        crashes = 0
        record.unlink(missing_ok=True)
    code, why = decide(state, crashes, args.max_crashes)
    print(f"job {args.job}, attempt {args.attempt}: {why}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
