"""No process of an engine outlives the trainer that started it, however that trainer dies.

An engine host leads a session of its own; vLLM's processes are its descendants in that session. Two watches cover every
order of deaths: the host waits for the local main's death and then ends its whole session (`end_session_with`); each
vLLM process waits for its own parent's death (`die_with_parent`, through our vLLM plugin), which covers a host that was
itself killed. Neither uses PR_SET_PDEATHSIG: it fires when the creating *thread* ends, and would take the host away
before it could end the others.
"""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from grpo.faults.sessions import WatchedProcess, end_session


def end_session_with(parent_pid: int, *, private_folder: Path) -> None:
    """In an engine host, before anything slow: end this session, and remove its folder, once `parent_pid` is gone."""
    _end_with(parent_pid, lambda: end_session(os.getsid(0), private_folder))


def die_with_parent() -> None:
    """End this process as soon as the one that started it through `multiprocessing` is gone; so will its own children.

    vLLM forks its processes out of the host, or spawns them: a spawned one calls this itself, through our plugin.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _end_with(parent.pid)
    _watch_forks()


@functools.cache  # once a process
def _watch_forks() -> None:
    parents: list[int] = []
    os.register_at_fork(
        before=lambda: parents.append(os.getpid()),
        after_in_parent=parents.clear,
        after_in_child=lambda: _end_with(parents[-1]),
    )


def _end_with(parent_pid: int, first: Callable[[], None] = lambda: None) -> None:
    # Opened here and not in the thread: before a worker of vLLM closes what it has inherited, twice and by number.
    parent = WatchedProcess(parent_pid)
    is_gone = os.getppid() != parent_pid  # it died before we looked

    def watch() -> None:
        if not is_gone:
            parent.wait()
        first()
        os.kill(os.getpid(), signal.SIGKILL)

    if is_gone:
        watch()
    threading.Thread(target=watch, name="grpo-parent-watch", daemon=True).start()
