"""Compile caches of engines, reused by later engines, and safe against an engine killed while it writes.

vLLM and torch's inductor write parts of their caches in place, and trust existing files: an empty library left by a
killed linker breaks every later start of the same model ("file too short"). So each running engine has its own cache
slot, under a lock that ends with its processes; the next engine reuses the slot. If a start ends before the engine is
ready, its slot is emptied, unless the engine was ended for being late: then complete files are kept, once, so that the
next start gets further. Works for engines started together, and in a folder shared by several nodes.
"""

import contextlib
import fcntl
import itertools
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")  # Triton puts whole folders in place by itself
_STARTING, _LATE, _AGAIN = b"starting", b"late", b"starting on what a late one has left"
_NOTE = "slots.json"  # in the host's private folder: its slots


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSlot:
    """Cache slot of an engine, held from before its first write to the end of its processes."""

    folder: Path
    lock: int
    """Descriptor of the slot's lock file, whose content shows if the holder is still starting. vLLM's processes are
    forked from the host and hold it too."""

    def is_ready(self) -> None:
        """Mark the cache as complete: the engine has started."""
        with contextlib.suppress(OSError):  # costs only time at the next start
            os.ftruncate(self.lock, 0)


def take_slots(environment: Mapping[str, str], otherwise: Path) -> tuple[dict[str, str], list[CacheSlot]]:
    """Take a slot of each cache named in `environment`.

    Args:
        otherwise: a folder for caches that cannot be kept: on a file system without locks, or not writable.

    Returns:
        Variables to set, and the slots to mark once the engine is ready.
    """
    variables, slots = {}, []
    for name in CACHES:
        if name not in environment:
            continue
        try:
            slot = take_slot(Path(environment[name]).expanduser())
        except OSError as error:
            variables[name] = str(otherwise / name.lower())
            text = "%s=%s is not used, what is compiled is not kept [GRPO-402]: %s"
            _log.warning(text, name, environment[name], error)
        else:
            variables[name] = str(slot.folder)
            slots.append(slot)
    return variables, slots


def take_slot(base: Path) -> CacheSlot:
    """Take the first free slot of the cache in `base`.

    Raises:
        OSError: `base` is not writable, or its file system has no locks.
    """
    slots = base / "slots"
    slots.mkdir(parents=True, exist_ok=True)
    taken = (_take(slots / str(number)) for number in itertools.count())
    return next(slot for slot in taken if slot is not None)


def _take(folder: Path) -> CacheSlot | None:
    """Return the slot in `folder`, emptied after a failed start, except a late one; None if an engine holds it."""
    lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before = os.pread(lock, len(_AGAIN), 0)
        if before not in (b"", _LATE) and folder.exists():
            shutil.rmtree(folder)
        _mark(lock, _AGAIN if before == _LATE else _STARTING)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return CacheSlot(folder=folder, lock=lock)


def _mark(lock: int, state: bytes) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, state, 0)


def note_slots(slots: Sequence[CacheSlot], private_folder: Path) -> None:
    """Write the host's slots to its private folder, for `end_late`."""
    (private_folder / _NOTE).write_text(json.dumps([str(slot.folder) for slot in slots]))


def end_late(members: Callable[[], Iterable[int]], private_folder: Path, end: Callable[[], None]) -> None:
    """End an engine not ready in time, and keep its compiled files for the next one.

    Files its processes were writing are deleted. After two late starts in a row nothing is kept: the second may hang
    because of the files it found.

    Args:
        members: returns the engine's processes.
        end: ends them.
    """
    folders: list[Path] = []
    with contextlib.suppress(OSError, ValueError):  # no slots yet
        folders = [Path(folder) for folder in json.loads((private_folder / _NOTE).read_text())]
    half_written: set[Path] = set()
    if folders:
        pids = [*members()]
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        half_written = {path for pid in pids for path in _open_for_writing(pid)}
    end()
    for folder in folders:
        with contextlib.suppress(OSError), folder.with_suffix(".lock").open("r+b", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == _STARTING:
                for path in half_written:
                    if path.is_relative_to(folder):
                        path.unlink(missing_ok=True)
                _mark(lock.fileno(), _LATE)


def _open_for_writing(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # it is gone
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError, IndexError):  # closed meanwhile
                flags = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().partition("flags:")[2].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    yield entry.readlink()
