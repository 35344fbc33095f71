"""What engines compile, kept from one to the next, so that one which is killed in the middle of it spoils no other.

vLLM and torch's inductor write parts of their caches in place, and take what they find there for whole: a library of
which a killed linker has left nothing ends every later start of the same model ("file too short"). So an engine works
in a generation of its cache, under a lock that ends with its processes. A start that finds that another one has ended
in this generation before its engine was ready begins the next generation. Locks and renames alone: it holds for
engines that start at once, and in a folder that several nodes share.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")  # Triton puts whole folders in place by itself
_ATTEMPTS = 20  # others begin a generation meanwhile


@dataclass(slots=True)
class CacheUse:
    """An engine's use of a generation, from before it writes to the end of its processes."""

    folder: Path
    """The generation."""
    record: Path
    """Says by its suffix how far this engine is; locked as long as one of its processes runs."""
    lock: int
    """Descriptor of the record. vLLM's processes come out of the host by fork and hold it, too."""

    def is_ready(self) -> None:
        """The engine has started: what it has compiled is whole."""
        with contextlib.suppress(OSError):  # gone, or the disk is full: it costs the next start time
            self.record = self.record.rename(self.record.with_suffix(".ready"))

    def give_up(self) -> None:
        """Nothing was written."""
        self.record.unlink(missing_ok=True)
        os.close(self.lock)


def use_caches(environment: Mapping[str, str], otherwise: Path) -> tuple[dict[str, str], list[CacheUse]]:
    """Take part in the caches that `environment` names.

    Args:
        otherwise: a folder for caches that cannot be shared: on a file system without locks, or not ours to write.

    Returns: variables to set, and what is told when the engine is ready.
    """
    variables, uses = {}, []
    for name in CACHES:
        if name not in environment:
            continue
        try:
            use = use_cache(Path(environment[name]).expanduser())
        except OSError as error:
            variables[name] = str(otherwise / name.lower())
            text = "%s=%s is not used, what is compiled is not kept [GRPO-402]: %s"
            _log.warning(text, name, environment[name], error)
        else:
            variables[name] = str(use.folder)
            uses.append(use)
    return variables, uses


def use_cache(base: Path) -> CacheUse:
    """Take part in the current generation of the cache in `base`, or begin the next one.

    Raises:
        OSError: `base` cannot be written, or its file system has no locks.
    """
    generations = base / "generations"
    for _ in range(_ATTEMPTS):
        current = _current(base)
        try:
            use = _begin_use(generations / current)
        except (FileNotFoundError, BlockingIOError):  # an old generation, being removed under our hands
            continue
        if _was_killed_starting(use):
            use.give_up()
            _begin_generation(base, instead_of=current)
        elif _current(base) != current:
            use.give_up()
        else:
            _remove_unused(generations, but=current)
            return use
    raise OSError(f"others begin a generation of {base} again and again")


def _current(base: Path) -> str:
    try:
        return (base / "generation").read_text()
    except FileNotFoundError:
        return "first"


def _begin_generation(base: Path, instead_of: str) -> None:
    if _current(base) != instead_of:
        return
    name = uuid.uuid4().hex
    pointer = base / f"generation.{name}"
    pointer.write_text(name)
    pointer.replace(base / "generation")


def _begin_use(folder: Path) -> CacheUse:
    users = folder / "users"
    users.mkdir(parents=True, exist_ok=True)
    new = users / f"{uuid.uuid4().hex}.new"  # nobody looks at it before it is locked
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return CacheUse(folder=folder, record=new.rename(new.with_suffix(".starting")), lock=lock)
    except OSError:
        os.close(lock)
        new.unlink(missing_ok=True)
        raise


def _was_killed_starting(use: CacheUse) -> bool:
    """Whether an engine has ended in this generation before it was ready; records of others that ended are removed."""
    was_killed = False
    for record in use.record.parent.iterdir():
        if record == use.record or record.suffix == ".new" or not _has_ended(record):
            continue
        if record.suffix == ".ready":
            record.unlink(missing_ok=True)
        else:
            was_killed = True  # its record stays: others that start now are to see it
    return was_killed


def _has_ended(record: Path) -> bool:
    """Whether nobody holds a record's lock. Not for one's own: over NFS that would give it up."""
    try:
        lock = os.open(record, os.O_RDWR)
    except FileNotFoundError:  # ready meanwhile, or given up
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return record.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def _remove_unused(generations: Path, but: str) -> None:
    for folder in generations.iterdir():
        if folder.name == but:
            continue
        with contextlib.suppress(OSError):  # removed by another, or another's to remove
            if all(_has_ended(record) for record in (folder / "users").iterdir()):
                shutil.rmtree(folder)
