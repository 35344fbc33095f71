"""What engines compile, kept for the next, so that one which is killed in the middle of it spoils no other.

vLLM and torch's inductor write parts of their caches in place, and take what they find there for whole: a library of
which a killed linker has left nothing ends every later start of the same model ("file too short"). So each engine that
runs has a slot of its own, under a lock that ends with its processes, and the next one finds there what was compiled.
Of a start that has ended before its engine was ready the slot is emptied, but for one that was ended because it was
late: of that what is whole stays, once, so that the next one gets further. It holds for engines that start at once, and
in a folder that several nodes share.
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
_NOTE = "slots.json"  # in the host's private folder: the slots that it has taken


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSlot:
    """An engine's slot, from before it writes to the end of its processes."""

    folder: Path
    lock: int
    """Descriptor of the slot's lock file, which says whether the engine that holds it is still starting. vLLM's
    processes come out of the host by fork and hold it, too."""

    def is_ready(self) -> None:
        """The engine has started: what it has compiled is whole."""
        with contextlib.suppress(OSError):  # it costs the next start time
            os.ftruncate(self.lock, 0)


def take_slots(environment: Mapping[str, str], otherwise: Path) -> tuple[dict[str, str], list[CacheSlot]]:
    """Take a slot of each cache that `environment` names.

    Args:
        otherwise: a folder for caches that cannot be kept: on a file system without locks, or not ours to write.

    Returns: variables to set, and what is told when the engine is ready.
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
    """Take the first slot of the cache in `base` that no engine holds.

    Raises:
        OSError: `base` cannot be written, or its file system has no locks.
    """
    slots = base / "slots"
    slots.mkdir(parents=True, exist_ok=True)
    taken = (_take(slots / str(number)) for number in itertools.count())
    return next(slot for slot in taken if slot is not None)


def _take(folder: Path) -> CacheSlot | None:
    """The slot in `folder`, emptied where a start has ended in it that was not late; None where an engine holds it."""
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
    """In a host: where `end_late` finds its slots."""
    (private_folder / _NOTE).write_text(json.dumps([str(slot.folder) for slot in slots]))


def end_late(members: Callable[[], Iterable[int]], private_folder: Path, end: Callable[[], None]) -> None:
    """End an engine that is not ready in time, and keep what it has compiled for the next one.

    What one of its processes was writing goes. And of two late starts in a row the second one leaves nothing: it may be
    what it had found there that it hangs of.

    Args:
        members: the engine's processes.
        end: ends them.
    """
    folders: list[Path] = []
    with contextlib.suppress(OSError, ValueError):  # it has not come so far
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
