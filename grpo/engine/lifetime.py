"""No process of an engine outlives the trainer that started it, however that trainer dies.

An engine host leads a session of its own; vLLM's processes are its descendants in that session. Two watches cover every
order of deaths: the host waits for the local main's death and then ends its whole session (`end_session_with`); each
vLLM process waits for its own parent's death (`die_with_parent`, through our vLLM plugin), which covers a host that was
itself killed. Neither uses PR_SET_PDEATHSIG: it fires when the creating *thread* ends, and would take the host away
before it could end the others.
"""

import contextlib
import functools
import multiprocessing
import os
import select
import shutil
import signal
import threading
import time
from pathlib import Path

REMOVAL_S = 2.0


def session_members(session_id: int) -> list[int]:
    """Pids of the live processes in the session `session_id`."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended while we looked
            # Fields after the command, which may itself hold spaces and parentheses: state ppid pgrp session
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == session_id and state not in "ZX":
                members.append(int(entry.name))
    return members


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def end_session(session_id: int, private_folder: Path, *, tracker_grace_s: float = 10.0) -> None:
    """SIGKILL every process of an engine's session but the caller's own, and remove what they leave behind.

    Python's resource trackers are left to the last: they end by themselves once the processes that they track are gone,
    and unlink the shared memory and the semaphores that those left behind. One whose processes include the caller goes
    on until the caller ends.
    """
    members = set(session_members(session_id))
    trackers = {pid for pid in members if _is_resource_tracker(pid)}
    deadline = time.monotonic() + tracker_grace_s
    others = members - trackers - {os.getpid()}
    while others and time.monotonic() < deadline:
        _kill(others)
        time.sleep(0.02)
        others = set(session_members(session_id)) - trackers - {os.getpid()}  # dying, or started while we looked
    remove_traces(private_folder)
    if os.getpid() in members:
        return
    while (left := set(session_members(session_id))) and time.monotonic() < deadline:
        _kill(left - trackers)
        time.sleep(0.05)
    _kill(left)


def _kill(pids: set[int]) -> None:
    for pid in pids - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_for_death(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([pidfd], [], [])
    os.close(pidfd)


def remove_traces(private_folder: Path) -> None:
    """Remove an engine's private folder, and the shared memory that its CPU workers named after a file in it.

    Again while it is there: who goes on for a moment, the caller's own threads or a resource tracker, may put
    something into it meanwhile.
    """
    for rendezvous in private_folder.glob("vllm_dist_*"):
        for segment in Path("/dev/shm").glob(f"{rendezvous.name}-*"):
            segment.unlink(missing_ok=True)
    deadline = time.monotonic() + REMOVAL_S
    shutil.rmtree(private_folder, ignore_errors=True)
    while private_folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
        shutil.rmtree(private_folder, ignore_errors=True)


def end_session_with(parent_pid: int, *, private_folder: Path) -> None:
    """In an engine host, before anything slow: end this session, and remove its folder, once `parent_pid` is gone."""

    def watch() -> None:
        _wait_for_death(parent_pid)
        end_session(os.getsid(0), private_folder)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="grpo-parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:  # it died before we looked
        os.kill(os.getpid(), signal.SIGKILL)


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


def _end_with(parent_pid: int) -> None:
    def watch() -> None:
        _wait_for_death(parent_pid)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="grpo-parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:  # it died before we looked
        os.kill(os.getpid(), signal.SIGKILL)
