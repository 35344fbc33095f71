"""The log of a process: a logger for each package, one file for each process, written by a thread of its own.

`logs/<role>-node<k>-<i>.attempt-<n>.log` gets what the loggers below `grpo` are given, in lines like

    2026-11-23T22:51:07.412Z DEBUG rank-node1-1 MainThread grpo.weights.delivery: weight sync 3 begins: policy version 2

A thread that logs puts a line into a bounded queue, and never touches a file or waits: a folder that hangs costs
records, which are counted, and nothing else. Lines wait in the queue until the folder is known. Only the standard
library is needed: sentinels and engine hosts log, too.
"""

import atexit
import contextlib
import logging
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

LOGS_FOLDER = "logs"  # in the run's folder
VARIABLE = "GRPO_LOG"  # `debug`, or packages: `weights,engine`, `weights=debug,faults=warning`
MAX_WAITING = 10_000  # lines in the queue: more than ranks write in hours at INFO
MAX_BATCH = 500  # lines in one write
MAX_LINE = 20_000  # characters; a failure record has 16,000
END_S = 2.0  # for what waits when the process ends as it should
FLUSH_S = 0.5  # for what waits when a process ends itself
SAY_S = 1.0  # for a line to standard error, whose reader may be stopped

# What `extra=` says of a record; the screen shows others from INFO on, of rank 0.
FILE_ONLY = {"on_screen": False}
"""It is not shown, whatever its level: the thread may not wait for a screen, or the user reads it elsewhere."""
EVERY_RANK = {"on_screen": True}
"""It is shown from whichever rank it is."""

_RECORD = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z [A-Z]+ \S+ \S+ grpo\.")
_PACKAGE = Path(__file__).resolve().parents[1]
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_Line = tuple[str, str]  # what stands before the name of the process, and what behind it
_Item = _Line | Path | threading.Event

_log = logging.getLogger(__name__)


class UnlockedHandler(logging.Handler):
    """A handler without logging's lock: a thread that another one interrupts there would hold it for good."""

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        if passes := bool(self.filter(record)):
            self.emit(record)
        return passes


class LogFile(UnlockedHandler):
    """Writes records to the file of this process. Any thread may log, and a signal handler: it waits for no lock.

    Args:
        max_waiting: lines in the queue; of more, records are dropped.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.num_dropped = 0
        """Records that are in no file, and of which no file says so yet. Changed by `+=` alone, which the GIL of
        CPython 3.11 to 3.13 does not interrupt."""
        self.path: Path | None = None
        self._max_waiting = max_waiting
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        """Also in a forked child, which has its parent's file and none of its threads."""
        # `SimpleQueue` is in C: an exception that another thread raises in this one finds no lock held.
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= self._max_waiting:
            self.num_dropped += 1
            return
        try:
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
        except Exception as error:  # noqa: BLE001  a record that cannot be shown is no reason to fail
            text = f"{record.msg!r} cannot be formatted: {type(error).__name__}: {error}"
        text = text[:MAX_LINE].rstrip().replace("\n", "\n    ")
        thread = (record.threadName or "?").replace(" ", "-")
        self._waiting.put((f"{_time(record.created)} {record.levelname}", f"{thread} {record.name}: {text}\n"))
        if self._thread is None and self.path is not None:  # in a forked child
            self._start(self.path)

    def open(self, path: Path) -> None:
        """Write to this file from now on, and first what waits. Its name up to the first dot is in every line."""
        is_first, self.path = self._thread is None, path
        if is_first:
            self._pid = os.getpid()
            self._start(path)
        else:
            self._waiting.put(path)

    def _start(self, path: Path) -> None:
        self._thread = threading.Thread(target=self._write, args=[path, self._waiting], name="grpo-log", daemon=True)
        self._thread.start()

    def flush_within(self, timeout_s: float) -> bool:
        """Whether all that was logged before is written; waits so long at most. Before `open` there is no file."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        self._waiting.put(is_done)
        return is_done.wait(timeout_s) and not self.num_dropped

    @property
    def num_missing(self) -> int:
        """Records that are in no file yet."""
        return self.num_dropped + self._waiting.qsize()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _write(self, path: Path, waiting: "queue.SimpleQueue[_Item]") -> None:
        while True:
            batch = [waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < MAX_BATCH:
                    batch.append(waiting.get_nowait())
            lines: list[_Line] = []
            for item in batch:
                if isinstance(item, tuple):
                    lines.append(item)
                    continue
                self._append(path, lines)
                lines = []
                if isinstance(item, Path):
                    path = item
                else:
                    item.set()
            self._append(path, lines)

    def _append(self, path: Path, lines: list[_Line]) -> None:
        """The file is opened for each batch: its folder may be new, or its disk have been full, a moment ago."""
        if not lines:
            return
        dropped = self.num_dropped
        who = path.name.partition(".")[0] + ("" if os.getpid() == self._pid else f"/{os.getpid()}")
        if dropped:
            behind = f"grpo-log {__name__}: {dropped} records are missing here: {_WHY}\n"
            lines = [(f"{_time(time.time())} WARNING", behind), *lines]
        left = "".join(f"{before} {who} {behind}" for before, behind in lines).encode(errors="backslashreplace")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while left:
                    left = left[os.write(file, left) :]
            finally:
                os.close(file)
        except OSError:
            self.num_dropped += len(lines) - bool(dropped)
        else:
            self.num_dropped -= dropped


_WHY = "the log could not be written, or not as fast as they came"


def is_record(line: str) -> bool:
    """Whether a line of an engine's log is one of ours; others are vLLM's."""
    return _RECORD.match(line) is not None


def _time(at: float) -> str:
    """In UTC: nodes may live in other time zones."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at * 1000) % 1000:03d}Z"


# -- this process -----------------------------------------------------------------------------------------------------

_file: LogFile | None = None


def start_log(level: int | None = None) -> None:
    """Have the loggers below `grpo` take records, which wait for `open_log`. Again to set another level.

    They hand nothing on to the root logger, which is the script's: a handler there would show again what is on the
    screen already.

    Args:
        level: of what the variable does not name; None: as it is, at first INFO.
    """
    global _file
    ours = logging.getLogger("grpo")
    if _file is None:
        _file = LogFile()
        ours.addHandler(_file)
        ours.propagate = False
        ours.setLevel(logging.INFO)
        atexit.register(_end)
    if level is not None:
        ours.setLevel(level)
    for name, chosen in _levels(os.environ)[0].items():
        logging.getLogger(name).setLevel(chosen)


def log_name(role: str, *, node: int, attempt: int, index: int | None = None) -> str:
    """Of a process's file, so that a job that is started again does not go on in the file of the attempt before.

    Args:
        index: which of its role on the node: a rank's number in the job, an engine's on the node.
    """
    which = "" if index is None else f"-{index}"
    return f"{role}-node{node}{which}.attempt-{attempt}.log"


def open_log(path: Path, about: str = "") -> None:
    """Write this process's log to `path`, `<role>-node<k>-<i>.attempt-<n>.log` in the run's `logs`.

    Args:
        about: this process, for the first line.
    """
    start_log()
    assert _file is not None
    if _file.path == path:
        return
    _file.open(path)
    pid, host, python = os.getpid(), socket.gethostname(), sys.version.split()[0]
    _log.info("this is pid %d on %s, Python %s%s", pid, host, python, about and f"; {about}", extra=FILE_ONLY)


def flush_log(timeout_s: float = FLUSH_S) -> None:
    """For a thread that is about to end the process: what has been logged may be written, within the time."""
    if _file is not None:
        _file.flush_within(timeout_s)


def _end() -> None:
    if _file is None or _file.flush_within(END_S):
        return
    line = f"[grpo] {_file.num_missing} records are missing in {_file.path}: {_WHY}\n"
    thread = threading.Thread(target=_say, args=[line], daemon=True)
    thread.start()
    thread.join(SAY_S)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


def check_log_variable(env: Mapping[str, str]) -> None:
    """Raises ValueError when the variable names what is no package or level."""
    _, wrong = _levels(env)
    if wrong:
        packages = sorted(path.parent.name for path in _PACKAGE.glob("*/__init__.py"))
        raise ValueError(
            f"{VARIABLE} is {env[VARIABLE]!r}, but {wrong!r} is neither a level ({', '.join(_LEVELS)}) nor one of the "
            f"packages {', '.join(packages)}: write {VARIABLE}=debug, or {VARIABLE}=weights,engine"
        )


def _levels(env: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """Levels by logger, as the variable has them, and the first word of it that is none."""
    found, wrong = {}, ""
    for word in filter(None, (word.strip() for word in env.get(VARIABLE, "").split(","))):
        name, _, level = word.partition("=")
        if not level and name.lower() in _LEVELS:
            name, level = "grpo", name
        parts = [part for part in name.split(".") if part != "grpo"]
        path = _PACKAGE.joinpath(*parts)
        is_there = all(part.isidentifier() for part in parts) and (path.is_dir() or path.with_suffix(".py").is_file())
        if is_there and (level or "debug").lower() in _LEVELS:
            found[".".join(["grpo", *parts])] = _LEVELS[(level or "debug").lower()]
        else:
            wrong = wrong or word
    return found, wrong
