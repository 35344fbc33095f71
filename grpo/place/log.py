"""The log of a process: a logger per package, one file per process, written by its own thread.

`logs/<role>-node<k>-<i>.attempt-<n>.log` gets the records of all loggers below `grpo`, in lines like

    2026-11-23T22:51:07.412Z DEBUG rank-node1-1 MainThread grpo.weights.delivery: weight sync 3 begins: policy version 2

Logging puts a line into a bounded queue, and never touches a file or waits: a hanging folder costs records, which are
counted, and nothing else. Lines wait in the queue until the folder is known. Needs the standard library alone, because
sentinels and engine hosts log too.
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
END_S = 2.0  # to write the rest of the queue at a normal exit
FLUSH_S = 0.5  # to write the rest of the queue before a process ends itself
SAY_S = 1.0  # for one line to standard error, whose reader may be stopped

# Values for `extra=`. By default the screen shows records of rank 0 from INFO on.
FILE_ONLY = {"on_screen": False}
"""Keep a record off the screen at any level: the thread may not wait for a screen, or the user reads it elsewhere."""
EVERY_RANK = {"on_screen": True}
"""Show a record of any rank on the screen."""

_RECORD = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z [A-Z]+ \S+ \S+ grpo\.")
_PACKAGE = Path(__file__).resolve().parents[1]
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_Line = tuple[str, str]  # text before the process's name, and text after it
_Item = _Line | Path | threading.Event

_log = logging.getLogger(__name__)


class UnlockedHandler(logging.Handler):
    """A handler without logging's lock: a thread interrupted while holding it would never release it."""

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        if passes := bool(self.filter(record)):
            self.emit(record)
        return passes


class LogFile(UnlockedHandler):
    """Handler of this process's log file. Any thread or signal handler may log; none waits for a lock.

    Args:
        max_waiting: most lines in the queue; further records are dropped.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.num_dropped = 0
        """Records dropped and not yet reported in a file. Changed only by `+=`, which is atomic under the GIL of
        CPython 3.11 to 3.13."""
        self.path: Path | None = None
        self._max_waiting = max_waiting
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        """Reset the queue and the thread; also in a forked child, which has its parent's file and none of its
        threads."""
        # `SimpleQueue` is in C: an exception that another thread raises in this one leaves no lock held.
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
        except Exception as error:  # noqa: BLE001  a record that cannot be formatted is no reason to fail
            text = f"{record.msg!r} cannot be formatted: {type(error).__name__}: {error}"
        text = text[:MAX_LINE].rstrip().replace("\n", "\n    ")
        thread = (record.threadName or "?").replace(" ", "-")
        self._waiting.put((f"{_time(record.created)} {record.levelname}", f"{thread} {record.name}: {text}\n"))
        if self._thread is None and self.path is not None:  # in a forked child
            self._start(self.path)

    def open(self, path: Path) -> None:
        """Write to this file from now on, starting with the queued lines. Every line has the file's name up to its
        first dot."""
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
        """Wait until all earlier records are written; return False on timeout or if records were dropped. True before
        `open`."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        self._waiting.put(is_done)
        return is_done.wait(timeout_s) and not self.num_dropped

    @property
    def num_missing(self) -> int:
        """Records not yet in any file."""
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
        """Append lines. Opens the file for each batch: its folder may be new, or a full disk may have space again."""
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
    """True if a line of an engine's log is ours; other lines are vLLM's."""
    return _RECORD.match(line) is not None


def _time(at: float) -> str:
    """Format a time in UTC: nodes may be in different time zones."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at * 1000) % 1000:03d}Z"


# -- this process -----------------------------------------------------------------------------------------------------

_file: LogFile | None = None


def start_log(level: int | None = None) -> None:
    """Let the loggers below `grpo` take records, which are queued until `open_log`. Call again to set another level.

    Nothing is propagated to the root logger, which belongs to the script: a handler there would repeat records on the
    screen.

    Args:
        level: level of loggers not named by the variable. None: unchanged, at first INFO.
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
    """Name of a process's log file. It has the attempt, so that a restarted job does not append to the earlier file.

    Args:
        index: number within the role: a global rank, or an engine's number on the node.
    """
    which = "" if index is None else f"-{index}"
    return f"{role}-node{node}{which}.attempt-{attempt}.log"


def open_log(path: Path, about: str = "") -> None:
    """Write this process's log to `path`, `<role>-node<k>-<i>.attempt-<n>.log` in the run's `logs`.

    Args:
        about: description of this process, for the first line.
    """
    start_log()
    assert _file is not None
    if _file.path == path:
        return
    _file.open(path)
    pid, host, python = os.getpid(), socket.gethostname(), sys.version.split()[0]
    _log.info("this is pid %d on %s, Python %s%s", pid, host, python, about and f"; {about}", extra=FILE_ONLY)


def flush_log(timeout_s: float = FLUSH_S) -> None:
    """Write queued records, for at most `timeout_s`. For a thread about to end the process."""
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
    """Raise ValueError if the variable names an unknown package or level."""
    _, wrong = _levels(env)
    if wrong:
        packages = sorted(path.parent.name for path in _PACKAGE.glob("*/__init__.py"))
        raise ValueError(
            f"{VARIABLE} is {env[VARIABLE]!r}, but {wrong!r} is neither a level ({', '.join(_LEVELS)}) nor one of the "
            f"packages {', '.join(packages)}: write {VARIABLE}=debug, or {VARIABLE}=weights,engine"
        )


def _levels(env: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """Parse the variable: levels by logger, and the first invalid word ("" if there is none)."""
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
