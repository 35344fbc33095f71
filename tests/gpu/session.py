"""One pytest session of `make test-gpu`, in a process that a hang may take along: `python -m tests.gpu` starts it.

    python -m tests.gpu.session CHANNEL FOLDER [PYTEST ARGUMENTS]

Writes what happens to `CHANNEL/events.jsonl`, a record a line, and the stacks of a test that reaches its limit to
`CHANNEL/stacks.txt`. Leaves out the tests that `CHANNEL/done.json` names.
"""

import faulthandler
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.report import duration
from tests.gpu.requirements import Needs, missing_for, needs

ROOT = Path(__file__).resolve().parents[2]
EVENTS, DONE, STACKS = "events.jsonl", "done.json", "stacks.txt"

# Without what pyproject.toml asks for `make test`: neither xdist nor timeout need be installed.
OPTIONS = ("-o", "addopts=", "-o", "timeout=0", "-W", "ignore::pytest.PytestConfigWarning", "--rootdir", str(ROOT))


class Telling:
    """Writes pytest's hooks down as events, and says before each test how long it takes."""

    def __init__(self, channel: Path) -> None:
        self._events = (channel / EVENTS).open("a")
        self._stacks = (channel / STACKS).open("w")
        self._done = set(json.loads((channel / DONE).read_text()))
        self._needs: dict[str, Needs] = {}
        self._missing: dict[str, list[str]] = {}

    def tell(self, event: str, **more: Any) -> None:
        self._events.write(json.dumps({"event": event, **more}) + "\n")
        self._events.flush()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        asked = {item: needs(item) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not asked[item].gpus])
        items[:] = sorted((item for item in items if asked[item].gpus), key=lambda item: asked[item].gpus)
        for item in items:
            need = self._needs[item.nodeid] = asked[item]
            self._missing[item.nodeid] = missing_for(item)
            name = item.nodeid.rpartition("/")[2]
            self.tell(
                "collected", id=item.nodeid, name=name, gpus=need.gpus, usual_s=need.usual_s, limit_s=need.limit_s
            )
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell("unreadable", id=report.nodeid, detail=report.longreprtext.splitlines()[-1])

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.tell("not chosen", ids=[item.nodeid for item in items])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        usual = [self._needs[item.nodeid].usual_s for item in session.items if not self._missing[item.nodeid]]
        print(f"{len(usual)} tests can run here: about {duration(sum(usual))} in all, by estimate")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        need = self._needs[nodeid]
        if not self._missing[nodeid]:
            usual, limit = duration(need.usual_s), duration(need.limit_s)
            print(f"\n{nodeid.rpartition('/')[2]}: about {usual} by estimate, ended after {limit}")
        self.tell("began", id=nodeid)
        faulthandler.dump_traceback_later(need.limit_s, file=self._stacks)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
        value = yield
        if isinstance(value, Path):
            self.tell("folder", path=str(value))
        return value

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        more: dict[str, Any] = {}
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            more = {"result": "not run", "detail": reason.removeprefix("Skipped: ")}
        elif report.failed:
            reported = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            first = (reported or [report.longreprtext])[0][:300]
            more = {"result": "FAILED", "detail": first, "text": report.longreprtext}
        elif report.when == "call":
            figures = [value for name, value in report.user_properties if name == "figure"]
            more = {"result": "passed", "figures": figures}
        self.tell("reported", id=report.nodeid, seconds=report.duration, **more)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.tell("finished", id=nodeid)


def main(channel: Path, folder: str, arguments: list[str]) -> int:
    # Without the conftest.py of all tests, which needs transformers.
    options = [*OPTIONS, "-v", "--confcutdir", folder, *arguments, folder]
    return int(pytest.main(options, plugins=[Telling(channel)]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
