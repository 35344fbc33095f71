"""End of an engine's processes with their trainer, however it dies.

An engine host is a session leader; vLLM's processes are its descendants in this session. Two watches cover every order
of deaths. The host waits for the local main's death and then ends its whole session (`end_session_with`). Each vLLM
process waits for its own parent's death (`die_with_parent`, through our vLLM plugin), which covers a killed host.
Neither uses PR_SET_PDEATHSIG: it fires when the creating *thread* ends, and would end the host before it could end the
others.
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
    """End this session, and remove its folder, once `parent_pid` is gone; call it first in an engine host."""
    _end_with(parent_pid, lambda: end_session(os.getsid(0), private_folder))


def die_with_parent() -> None:
    """End this process as soon as its parent in `multiprocessing` is gone; the same for its own children.

    vLLM forks its processes from the host, or spawns them; a spawned one calls this itself, through our plugin.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _end_with(parent.pid)
    _watch_forks()


@functools.cache  # once per process
def _watch_forks() -> None:
    parents: list[int] = []
    os.register_at_fork(
        before=lambda: parents.append(os.getpid()),
        after_in_parent=parents.clear,
        after_in_child=lambda: _end_with(parents[-1]),
    )


def _end_with(parent_pid: int, first: Callable[[], None] = lambda: None) -> None:
    # Opened here and not in the thread: before a vLLM worker closes inherited descriptors, twice and by number.
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
