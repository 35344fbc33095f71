"""An agent given as a command: one process per row, with its endpoint in environment variables."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from grpo.engine.environment import without_launcher
from grpo.faults.sessions import WatchedProcess, end_session
from grpo.faults.users_code import Worker
from grpo.place.timeouts import USUAL, Timeouts
from grpo.rollout.agents.door import Door

STDOUT_BYTES = 1 << 20  # the last line of it is read


class AgentFailed(RuntimeError):
    """The command ended with an error."""


class AgentProcess:
    """One run of a command, in its own session and with its own temporary folder.

    Args:
        argv: command, run in the working directory of the rank.
        row: columns of the data set, passed as JSON on standard input.
        log: file for its standard error.
        covers, uncovers: register a folder to remove and a session to end with the sentinel, which outlives this
            process.
    """

    def __init__(
        self,
        argv: Sequence[str],
        door: Door,
        row: Mapping[str, Any],
        log: Path,
        covers: Callable[[Path, int], None],
        uncovers: Callable[[Path], None],
        timeouts: Timeouts = USUAL,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="grpo-agent-"))
        self._uncovers, self._end_s = uncovers, timeouts.agent_end_s
        env = {
            **without_launcher(os.environ),
            "OPENAI_BASE_URL": door.url,
            "OPENAI_API_KEY": door.key,
            "OPENAI_MODEL": door.model,
            "TMPDIR": str(self._folder),
            "CUDA_VISIBLE_DEVICES": "",  # for the trainer and the engines only
            "PYTHONUNBUFFERED": "1",
        }
        # Not a pipe, which would wait for any process left behind by the command.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with tempfile.TemporaryFile() as given, log.open("ab") as errors:
                given.write(json.dumps(row, default=str).encode())
                given.seek(0)
                process = subprocess.Popen(
                    argv, stdin=given, stdout=self._said, stderr=errors, env=env, start_new_session=True
                )
        except BaseException:
            self._said.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        covers(self._folder, process.pid)
        self._process, self._watched = process, WatchedProcess(process.pid)
        self._reaping = threading.Lock()
        self._done: Future[dict[str, Any]] = Future()
        self._close = weakref.finalize(self, _close, process, self._folder)  # at the interpreter's exit, too

    def start(self) -> "Future[dict[str, Any]]":
        """Wait for the command; the future has the columns in its last line. Nothing of its session is left then.

        Raises:
            AgentFailed: its exit status is not 0, or its last line is not a JSON object.
        """
        self._done = Worker("grpo-agent").run(self._wait)
        return self._done

    def end(self) -> None:
        """End the command, by SIGKILL if necessary. Returns at once."""
        Worker("grpo-agent").run(self._end)

    def _wait(self) -> dict[str, Any]:
        try:
            self._watched.wait()
            with self._reaping:
                self._close()
            size = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, size - STDOUT_BYTES))
            return columns_of(self._said.read(), self._process.returncode)
        finally:
            self._said.close()
            self._watched.close()
            self._uncovers(self._folder)

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with self._reaping:
                if self._process.returncode is not None:
                    return
                os.kill(self._process.pid, number)  # not reaped yet: the pid is still its own
            wait([self._done], self._end_s)


def columns_of(said: bytes, status: int) -> dict[str, Any]:
    """Parse the last line of a command's output, a JSON object; {} without output."""
    if status:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        raise AgentFailed(f"it ended {how}; its standard error is in logs/")
    lines = said.decode(errors="replace").strip().splitlines()
    if not lines:
        return {}
    try:
        found = json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise AgentFailed(f"its last line is no JSON ({error}): {lines[-1][:200]!r}") from None
    if not isinstance(found, dict):
        raise AgentFailed(f"its last line is {type(found).__name__}, and has to be an object of columns")
    return found


def _close(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End the session, whose id cannot be reused until its leader is reaped."""
    end_session(process.pid, folder)
    process.wait()
