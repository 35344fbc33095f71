"""`make test-gpu`: runs what this machine's GPUs allow, prints what needs how many more, writes `runs/gpu-report.md`.

    python -m tests.gpu [PYTEST ARGUMENTS]

Needs torch (2.11 or newer) and pytest; the rest is said test by test. Tests without a GPU are left to `make test`.
The tests run in a process of their own. One that hangs, or takes that process along, ends with it and with all that it
has started; the others go on in a new one.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import pytest  # noqa: F401
    import torch  # noqa: F401  before anything is promised
except ModuleNotFoundError as error:
    sys.exit(f"make test-gpu needs {error.name}: pip install {error.name}, or make test-gpu PYTHON=...")

from tests.gpu.failures import keep_logs
from tests.gpu.report import Outcome, duration, machine, render, summary
from tests.gpu.requirements import RUN_BY, num_gpus, rehearsed
from tests.gpu.session import DONE, EVENTS, ROOT, STACKS
from tests.support.descendants import adopt, bury, end_descendants

REPORT = Path(os.environ.get("GRPO_GPU_REPORT", ROOT / "runs" / "gpu-report.md"))
FOLDER = os.environ.get("GRPO_GPU_TESTS", str(ROOT / "tests" / "gpu"))
POLL_S = 0.1
STACKS_S = 1.0  # from a test's limit, at which its process writes its stacks, to its end
ENDS_S = 30.0  # of pytest, after Ctrl-C


class Run:
    """All tests, in as many sessions as it takes. The report is written after every change."""

    def __init__(self, report: Path, facts: list[tuple[str, str]]) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._limits: dict[str, float] = {}
        self._report, self._facts = report, facts
        self._kept = report.with_name(f"{report.stem}-failures")
        self._running, self._began, self._folders = "", 0.0, list[Path]()
        self._tail = ""
        self._events: dict[str, Callable[..., None]] = {
            "collected": self._collect,
            "unreadable": self._read_in_vain,
            "not chosen": self._leave_out,
            "began": self._begin,
            "folder": self._note_folder,
            "reported": self._report_phase,
            "finished": self._finish,
        }
        shutil.rmtree(self._kept, ignore_errors=True)

    def run(self, arguments: list[str]) -> int:
        """Exit code of the last session, or 1 if one has ended otherwise than by itself."""
        code, again = 0, True
        while again:
            with tempfile.TemporaryDirectory(prefix="test-gpu-") as channel:
                ended, again = self._session(Path(channel), arguments)
            code = int(again) or code or ended
        return code

    def _session(self, channel: Path, arguments: list[str]) -> tuple[int, bool]:
        """One process of tests: its exit code, and whether a test ended it, so that others are left to run."""
        done = [name for name, outcome in self.outcomes.items() if outcome.detail != "not reached"]
        (channel / DONE).write_text(json.dumps(done))
        (channel / EVENTS).touch()
        self._tail = ""
        command = [sys.executable, "-m", "tests.gpu.session", str(channel), FOLDER, *arguments]
        process = subprocess.Popen(command)
        with (channel / EVENTS).open() as events:
            try:
                while (code := process.poll()) is None and not self._is_late():
                    time.sleep(POLL_S)
                    bury(process.pid)
                    self._take(events.read())
            except KeyboardInterrupt:  # pytest has it too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS_S)
                raise
            finally:
                left = end_descendants(process.pid)
                process.poll()
                self._take(events.read())
        if not self._running:  # without a code one that has just ended, at its limit
            return int(code or 0), code is None
        how = f"took its process along (exit code {code})"
        if code is None:
            limit = duration(self._limits[self._running])
            how = f"hung: ended after {limit}, with the processes that it had started"
        if left:
            how += f"; processes {left} cannot be killed, and may hold their GPUs"
        outcome = self.outcomes[self._running]
        outcome.seconds = time.monotonic() - self._began
        self._fail(self._running, how, channel / STACKS)
        self._running = ""
        print(f"\n{outcome.name}: {how}")
        return int(code or 1), True

    def _is_late(self) -> bool:
        return bool(self._running) and time.monotonic() > self._began + self._limits[self._running] + STACKS_S

    def _take(self, written: str) -> None:
        *lines, self._tail = (self._tail + written).split("\n")
        for line in lines:
            event = json.loads(line)
            self._events[event.pop("event")](**event)
        if lines:
            self.write()

    def _collect(self, id: str, name: str, gpus: int, usual_s: float, limit_s: float) -> None:
        self._limits[id] = limit_s
        made = Outcome(name=name, gpus=gpus, result="not run", usual_s=usual_s, detail="not reached")
        self.outcomes.setdefault(id, made)

    def _read_in_vain(self, id: str, detail: str) -> None:
        self.outcomes[id] = Outcome(name=id, gpus=0, result="FAILED", detail=f"could not be read: {detail}")

    def _leave_out(self, ids: list[str]) -> None:
        for each in ids:
            if each in self.outcomes and self.outcomes[each].result == "not run":
                self.outcomes[each].detail = "not chosen on the command line"

    def _begin(self, id: str) -> None:
        self._running, self._began, self._folders = id, time.monotonic(), []
        self.outcomes[id].result, self.outcomes[id].detail = "began", ""

    def _note_folder(self, path: str) -> None:
        self._folders.append(Path(path))

    def _report_phase(self, id: str, seconds: float, text: str = "", **more: Any) -> None:
        outcome = self.outcomes[id]
        outcome.seconds += seconds
        if more.get("result") == "FAILED":
            self._fail(id, more["detail"], text=text)
        elif outcome.result != "FAILED":  # a teardown may be skipped, too
            for name, value in more.items():
                setattr(outcome, name, value)

    def _finish(self, id: str) -> None:
        self._running = ""

    def _fail(self, id: str, detail: str, stacks: Path | None = None, *, text: str = "") -> None:
        outcome = self.outcomes[id]
        outcome.result, outcome.detail = "FAILED", outcome.detail or detail
        outcome.records, outcome.logs = keep_logs(outcome.name, self._folders, self._kept, stacks=stacks, text=text)
        self.write()

    def write(self) -> None:
        self._report.parent.mkdir(parents=True, exist_ok=True)
        self._report.write_text(render(self._facts, list(self.outcomes.values())))


def main(arguments: list[str]) -> int:
    adopt()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    os.environ[RUN_BY] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for jobs
    facts = [*machine(), *([("rehearsal", "jobs ran on CPU: nothing here was seen on a GPU")] if rehearsed() else [])]
    run = Run(REPORT, facts)
    try:
        code = run.run(arguments)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    run.write()
    outcomes = list(run.outcomes.values())
    where = "rehearsed on CPU" if rehearsed() else f"on {num_gpus()} GPUs"
    print(f"\nmake test-gpu {where}: {summary(outcomes)}")
    for needed in sorted({outcome.gpus for outcome in outcomes if outcome.result == "not run"}):
        left = [outcome for outcome in outcomes if outcome.gpus == needed and outcome.result == "not run"]
        for reason in dict.fromkeys(outcome.detail for outcome in left):
            names = [outcome.name.partition("[")[0].partition("::")[2] for outcome in left if outcome.detail == reason]
            print(f"  not run, {reason}:\n    {', '.join(dict.fromkeys(names))}")
    print(f"report: {os.path.relpath(REPORT)}")
    ran = any(outcome.result != "not run" for outcome in outcomes)
    if not ran:
        print("nothing ran: this shows nothing about GPUs")
    return code or int(not ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
