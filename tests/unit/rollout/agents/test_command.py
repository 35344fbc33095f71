"""Agents that are commands: their environment, their output, and that nothing of them stays."""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo.faults.sessions import process_state, session_members
from grpo.place.timeouts import Timeouts
from grpo.rollout.agents.command import AgentFailed, AgentProcess
from grpo.rollout.agents.door import Door

DOOR = Door(url="http://127.0.0.1:1/x/v1", key="sk-secret", model="policy")
DEADLINE_S = 60.0


class Run:
    """One run of a Python text, and what was said of it to whoever outlives the process."""

    def __init__(self, folder: Path, text: str, row: Any = None) -> None:
        self.covered: dict[Path, int] = {}
        self.all_covered: dict[Path, int] = {}
        self.log = folder / "agents.log"
        given = ([sys.executable, "-c", text], DOOR, row or {}, self.log, self._cover, self._uncover)
        self.process = AgentProcess(*given, Timeouts(agent_end_s=0.3))
        self.done = self.process.start()

    def _cover(self, folder: Path, session: int) -> None:
        self.covered[folder] = self.all_covered[folder] = session

    def _uncover(self, folder: Path) -> None:
        del self.covered[folder]

    def columns(self) -> dict[str, Any]:
        return self.done.result(DEADLINE_S)

    def expect_nothing_left(self) -> None:
        (folder, session), *others = self.all_covered.items()
        assert (others, self.covered) == ([], {})
        assert not folder.exists()
        assert session_members(session) == []


def test_agent_process_receives_row_and_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("JUDGE_API_KEY", "its own")
    run = Run(
        tmp_path,
        "import json, os, sys, tempfile\n"
        "row = json.load(sys.stdin)\n"
        "open(os.path.join(tempfile.mkdtemp(), 'left'), 'w').write('x')\n"
        "print('noise')\n"
        "print('to the log', file=sys.stderr)\n"
        "names = 'OPENAI_BASE_URL OPENAI_API_KEY OPENAI_MODEL RANK TORCHELASTIC_RUN_ID JUDGE_API_KEY'\n"
        "print(json.dumps({'row': row, 'env': [os.environ.get(name) for name in names.split()]}))\n",
        {"prompt": [{"role": "user", "content": "hi"}], "answer": 5},
    )
    found = run.columns()
    assert found["row"] == {"prompt": [{"role": "user", "content": "hi"}], "answer": 5}
    assert found["env"] == [DOOR.url, DOOR.key, "policy", None, None, "its own"]
    assert run.log.read_text() == "to the log\n"
    run.expect_nothing_left()


def test_agent_process_with_row_beyond_pipe_size_returns_columns(tmp_path: Path) -> None:
    run = Run(tmp_path, "import json; print('{\"done\": 1}')", {"text": "x" * (1 << 20)})
    assert run.columns() == {"done": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(3)", "it ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "it ended by SIGKILL"),
        ("print('solved')", "its last line is no JSON .*'solved'"),
        ("print('[1]')", "its last line is list"),
        ("print('[' * 100000)", "its last line is no JSON"),
    ],
)
def test_agent_process_failure_raises_with_reason(tmp_path: Path, text: str, message: str) -> None:
    run = Run(tmp_path, text)
    with pytest.raises(AgentFailed, match=message):
        run.columns()
    run.expect_nothing_left()


def test_agent_process_without_output_returns_no_columns(tmp_path: Path) -> None:
    assert Run(tmp_path, "pass").columns() == {}


def test_agent_process_exit_ends_its_children(tmp_path: Path) -> None:
    """Also in a group of its own, and with the output still open."""
    child = "import time; time.sleep(600)"
    run = Run(
        tmp_path,
        "import json, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], process_group=0)\n"
        "print(json.dumps({'child': child.pid}))\n",
    )
    child_pid = run.columns()["child"]
    assert process_state(child_pid) in ("", "Z")
    run.expect_nothing_left()


@pytest.mark.parametrize("heeds", [True, False])
def test_agent_process_end_sends_sigterm_then_sigkill(tmp_path: Path, heeds: bool) -> None:
    ready = tmp_path / "ready"
    run = Run(
        tmp_path,
        "import pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, {'lambda *_: exit(7)' if heeds else 'signal.SIG_IGN'})\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "while True: time.sleep(600)\n",
    )
    until = time.monotonic() + DEADLINE_S
    while not ready.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    run.process.end()
    with pytest.raises(AgentFailed, match="with status 7" if heeds else signal.SIGKILL.name):
        run.columns()
    run.expect_nothing_left()


def test_agent_process_with_unstartable_command_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "scratch"
    made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    with pytest.raises(PermissionError):
        AgentProcess([str(tmp_path)], DOOR, {}, tmp_path / "log", lambda *_: None, lambda *_: None)
    assert [*made.iterdir()] == []
