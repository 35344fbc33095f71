"""Rotation of checkpoints: deletion, quarantine, and the check of free space.

Quarantined checkpoints (another branch of the run, damaged ones) are kept for the user, but must not fill the disk:
only the `KEPT_QUARANTINED` written last are kept.
"""

import errno
import os
import shutil
from pathlib import Path

from grpo.checkpoints.checkpoints import (
    COMPLETE_FILE,
    DAMAGED_PREFIX,
    NAME_PREFIX,
    PARTIAL_FILE,
    checkpoints,
    read_complete,
    step_of,
)
from grpo.record.durable import sync_folder

LEAST_KEPT = 2  # complete ones: the newest may turn out to be damaged
KEPT_QUARANTINED = 2
ABANDONED = "abandoned.attempt-{}"
DELETED_PREFIX = ".deleted-"


def kept_limit(limit: int | None) -> int | None:
    """Number of complete checkpoints to keep for `save_total_limit`; None: all of them."""
    return None if limit is None or limit <= 0 else max(limit, LEAST_KEPT)


def is_partial(folder: Path) -> bool:
    """True if we began to write it and did not finish."""
    return (folder / PARTIAL_FILE).exists() and not (folder / COMPLETE_FILE).exists()


def to_rotate(output_dir: Path, *, limit: int | None, keep: set[Path]) -> list[Path]:
    """Checkpoints to delete: the oldest complete ones beyond `limit`, and older unfinished ones.

    Keeps at least `LEAST_KEPT` resumable ones, and those in `keep`: the best, the newly written.
    """
    if (limit := kept_limit(limit)) is None:
        return []
    complete, resumable, partial = [], [], []
    for folder in checkpoints(output_dir):
        try:
            record = read_complete(folder)
        except ValueError:
            if is_partial(folder):
                partial.append(folder)
            continue
        complete.append(folder)
        if record.resumable:
            resumable.append(folder)
    if not complete:
        return []
    protected = keep | set(resumable[:LEAST_KEPT])
    old = [folder for folder in reversed(complete) if folder not in protected]
    old = old[: max(0, len(complete) - limit)]
    return [*old, *(folder for folder in partial if step_of(folder) < step_of(complete[0]))]


def rotate(output_dir: Path, *, limit: int | None, keep: set[Path]) -> None:
    """Delete the result of `to_rotate`. Call it once the newest checkpoint is on disk."""
    for folder in to_rotate(output_dir, limit=limit, keep=keep):
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a checkpoint; one half deleted at the end of the process is removed at the next start."""
    going = folder.with_name(DELETED_PREFIX + folder.name)
    _replace(folder, going)
    shutil.rmtree(going, ignore_errors=True)


def delete_partial(output_dir: Path) -> list[Path]:
    """Delete unfinished checkpoints of earlier attempts: they cannot be resumed.

    Returns:
        The deleted checkpoints.
    """
    partial = [folder for folder in checkpoints(output_dir) if is_partial(folder)]
    for folder in partial:
        delete(folder)
    for pattern in (f"{DELETED_PREFIX}*", f"{ABANDONED.format('*')}/{DELETED_PREFIX}*"):
        for going in output_dir.glob(pattern):
            shutil.rmtree(going, ignore_errors=True)
    return partial


def begin_partial(folder: Path) -> None:
    """Prepare the folder of a new checkpoint, marked as partial until it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPLETE_FILE).unlink(missing_ok=True)
    for record in folder.glob("files-*.json"):  # of a checkpoint of the same step
        record.unlink()
    (folder / PARTIAL_FILE).touch()
    sync_folder(folder)


def quarantine(output_dir: Path, *, after_step: int, attempt: int) -> list[Path]:
    """Move checkpoints of later steps to `abandoned.attempt-<k>`: a branch that is not continued.

    Otherwise they would count as the newest ones, and the new branch's as old ones.

    Returns:
        Their new paths.
    """
    moved = []
    for folder in checkpoints(output_dir):
        if step_of(folder) > after_step:
            target = output_dir / ABANDONED.format(attempt) / folder.name
            target.parent.mkdir(exist_ok=True)
            _replace(folder, target)
            moved.append(target)
    return moved


def quarantine_damaged(folder: Path) -> Path:
    """Quarantine a damaged checkpoint by renaming it; returns its new path."""
    target = folder.with_name(DAMAGED_PREFIX + folder.name)
    _replace(folder, target)
    return target


def _replace(folder: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    os.rename(folder, target)
    sync_folder(target.parent)


def damaged_in(output_dir: Path) -> list[Path]:
    """List quarantined damaged checkpoints."""
    return sorted(output_dir.glob(f"{DAMAGED_PREFIX}{NAME_PREFIX}*"))


def bound_quarantine(output_dir: Path) -> list[Path]:
    """Delete quarantined checkpoints, except the `KEPT_QUARANTINED` written last.

    Returns:
        The deleted checkpoints.
    """
    abandoned = output_dir.glob(f"{ABANDONED.format('*')}/{NAME_PREFIX}*")
    aside = sorted([*abandoned, *damaged_in(output_dir)], key=_written_at, reverse=True)
    for folder in aside[KEPT_QUARANTINED:]:
        delete(folder)
        if folder.parent != output_dir and not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    return aside[KEPT_QUARANTINED:]


def _written_at(folder: Path) -> tuple[float, str]:
    record = folder / COMPLETE_FILE
    return (record if record.exists() else folder).stat().st_mtime, str(folder)


def size_of(folder: Path) -> int:
    """Size of a checkpoint in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_free_space(output_dir: Path, needed_bytes: int, *, rotated: list[Path]) -> None:
    """Refuse a save that does not fit, before anything is written.

    Args:
        rotated: checkpoints deleted afterwards. They do not count as space: they are deleted once the new one is on
            disk.

    Raises:
        OSError: has all numbers.
    """
    free = shutil.disk_usage(output_dir).free
    if free >= needed_bytes:
        return
    freed = ""
    if rotated:
        freed = (
            f", and {sum(size_of(folder) for folder in rotated) / 1e9:.1f} GB are freed only after it is complete "
            f"({', '.join(folder.name for folder in rotated)})"
        )
    raise OSError(
        errno.ENOSPC,
        f"a checkpoint needs about {needed_bytes / 1e9:.1f} GB, but {output_dir} has {free / 1e9:.1f} GB free{freed} "
        f"[GRPO-701]: free {(needed_bytes - free) / 1e9:.1f} GB, or lower save_total_limit (at least {LEAST_KEPT} are "
        "kept); nothing was written, the complete checkpoints are as they were",
    )
