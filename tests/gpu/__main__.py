"""`make test-gpu`: runs what this machine's GPUs allow, prints what needs how many more, writes `runs/gpu-report.md`.

    python -m tests.gpu [PYTEST ARGUMENTS]

Needs torch (2.11 or newer) and pytest; the rest is said test by test. Tests without a GPU are left to `make test`.
"""

import faulthandler
import os
import sys
from pathlib import Path

try:
    import pytest
    import torch  # noqa: F401  before anything is promised
except ModuleNotFoundError as error:
    sys.exit(f"make test-gpu needs {error.name}: pip install {error.name}, or make test-gpu PYTHON=...")

from tests.gpu.report import Outcome, machine, render, summary
from tests.gpu.requirements import RUN_BY, num_gpus, rehearsed

ROOT = Path(__file__).resolve().parents[2]
REPORT = Path(os.environ.get("GRPO_GPU_REPORT", ROOT / "runs" / "gpu-report.md"))
TEST_S = 1800  # of one test, whose own deadlines are shorter: only a hang on the device comes so far

# Without what pyproject.toml asks for `make test`: neither xdist nor timeout need be installed.
OPTIONS = ("-o", "addopts=", "-o", "timeout=0", "-W", "ignore::pytest.PytestConfigWarning", "--rootdir", str(ROOT))


class ReportPlugin:
    """Fills the outcomes from pytest's hooks, and writes the report after every change: a hang leaves it readable."""

    def __init__(self, path: Path, facts: list[tuple[str, str]], stderr: int) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._path, self._facts, self._stderr = path, facts, stderr

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        gpus = {item: max((mark.args[0] for mark in item.iter_markers("gpus")), default=0) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not gpus[item]])
        items[:] = sorted((item for item in items if gpus[item]), key=lambda item: gpus[item])
        for item in items:
            name = item.nodeid.rpartition("/")[2]
            self.outcomes[item.nodeid] = Outcome(name=name, gpus=gpus[item], result="not run", detail="not reached")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            detail = f"could not be read: {report.longreprtext.splitlines()[-1]}"
            self.outcomes[report.nodeid] = Outcome(name=report.nodeid, gpus=0, result="FAILED", detail=detail)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid in self.outcomes:
                self.outcomes[item.nodeid].detail = "not chosen on the command line"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcomes[nodeid].result, self.outcomes[nodeid].detail = "began", ""
        self.write()
        faulthandler.dump_traceback_later(TEST_S, exit=True, file=self._stderr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self.outcomes[report.nodeid]
        outcome.seconds += report.duration
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            outcome.result, outcome.detail = "not run", reason.removeprefix("Skipped: ")
        elif report.failed:
            told = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            outcome.result, outcome.detail = "FAILED", (told or [report.longreprtext])[0][:300]
        elif report.when == "call":
            outcome.result = "passed"
            outcome.figures = [value for name, value in report.user_properties if name == "figure"]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.write()

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(render(self._facts, list(self.outcomes.values())))


def main(arguments: list[str], folder: str = str(ROOT / "tests" / "gpu")) -> int:
    os.environ[RUN_BY] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for jobs
    facts = [*machine(), *([("rehearsal", "jobs ran on CPU: nothing here was seen on a GPU")] if rehearsed() else [])]
    plugin = ReportPlugin(REPORT, facts, os.dup(2))
    options = [*OPTIONS, "-v", "--confcutdir", folder]  # without the conftest.py of all tests, which needs transformers
    code = int(pytest.main([*options, *arguments, folder], plugins=[plugin]))
    plugin.write()
    outcomes = list(plugin.outcomes.values())
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
