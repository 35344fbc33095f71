"""Keeps what coverage.py has counted in processes that end without a word.

coverage.py writes at a process's exit. An engine's processes never get there: they end by SIGKILL, as does what a test
kills. So every measured process, forked ones too, writes the lines that it has reached to a file of its own, a few
times a second and before it kills itself. A plugin of coverage.py, which loads it where it starts (`make coverage`).
"""

import atexit
import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from coverage import Coverage

INTERVAL_S = 0.2
PREFIX = "lines."


class _Snapshots:
    """The lines that this process has reached, in `lines.<pid>.<start>.json`: {file: [line]}."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._name = f"{PREFIX}{self.pid}.{time.time_ns()}"
        self._reached: dict[str, set[int]] = {}
        self._num_written = 0
        self._lock = threading.Lock()

    def write(self) -> None:
        """Write what has come since the last time; a process that dies in the middle leaves the last file as it was."""
        measuring = Coverage.current()
        collector = getattr(measuring, "_collector", None)  # coverage.py has no public way to look without resetting
        if measuring is None or collector is None:
            return
        with self._lock:
            for file, lines in collector.data.copy().items():  # copies are atomic: other threads go on
                self._reached.setdefault(file, set()).update(lines.copy())
            num_lines = sum(map(len, self._reached.values()))
            if num_lines == self._num_written:
                return
            folder = Path(str(measuring.get_option("run:data_file"))).parent
            new = folder / f"{self._name}.new"
            new.write_text(json.dumps({file: sorted(lines) for file, lines in self._reached.items()}))
            new.replace(folder / f"{self._name}.json")
            self._num_written = num_lines

    def write_on(self) -> None:
        while True:
            time.sleep(INTERVAL_S)
            self.write()


_current: _Snapshots | None = None
_kill = os.kill
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


def _kill_after_writing(pid: int, signal: int) -> None:
    if pid == os.getpid() and _current is not None:
        _current.write()
    _kill(pid, signal)


def _untraced_before_raising(*args: Any) -> int:
    """Before an exception is set in another thread: this one is traced no more.

    While one waits for a thread that a library holds, a traced function is never entered (CPython 3.11: with tracing,
    RESUME checks for pending work again and again): the process could not be ended from this thread.
    """
    if _current is not None:
        _current.write()
    sys.settrace(None)
    return _set_exception(*args)


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """Called by coverage.py where it starts: at a process's beginning, and again in the child of a fork."""
    global _current
    if _current is not None and _current.pid == os.getpid():
        return
    if _current is None:
        os.kill = _kill_after_writing
        if sys.version_info < (3, 12):
            ctypes.pythonapi.PyThreadState_SetAsyncExc = _untraced_before_raising
        atexit.register(lambda: _current and _current.write())
    _current = _Snapshots()
    threading.Thread(target=_current.write_on, name="coverage-snapshots", daemon=True).start()
