"""Which checkpoints are complete: `complete.json` stands in them, written last, and every file has the size it says.

No other file proves it: DeepSpeed writes `latest` before its last barrier, and after `trainer_state.json` the other
ranks still write (deepspeed 0.19, transformers 5.17).
"""

import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from grpo.job.same_everywhere import read_versions

COMPLETE_FILE = "complete.json"
NAME_PREFIX = "checkpoint-"
BYTES_PER_PARAMETER = 16  # weights, and master weights and two moments in float32; 14 where weights are bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRecord:
    """What `complete.json` holds."""

    step: int
    """Optimizer steps that are in the checkpoint."""
    world_size: int
    """Ranks that wrote it."""
    files: dict[str, int]
    """Size in bytes by path inside the checkpoint."""
    versions: dict[str, str]
    """Of the packages that wrote it."""
    sampling: dict[str, int]
    """The settings that say which prompts come at which step."""
    resumable: bool = True
    """False when it holds the model alone (`save_only_model`)."""


def write_complete(
    folder: Path, *, step: int, world_size: int, sampling: dict[str, int], resumable: bool = True
) -> None:
    """Declare `folder` complete, atomically. On global rank 0, once every rank has written all of its files."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    record = CompleteRecord(
        step=step,
        world_size=world_size,
        files=files,
        versions=read_versions(),
        sampling=sampling,
        resumable=resumable,
    )
    write_atomically(folder / COMPLETE_FILE, json.dumps(asdict(record), indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part; also after the machine has crashed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_complete(folder: Path) -> CompleteRecord:
    """The record of a complete checkpoint.

    Raises:
        ValueError: says what is missing, and in which checkpoint.
    """
    try:
        value: dict[str, Any] = json.loads((folder / COMPLETE_FILE).read_text())
        record = CompleteRecord(**{field.name: value[field.name] for field in fields(CompleteRecord)})
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {COMPLETE_FILE}: its writing did not come to an end") from None
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / COMPLETE_FILE} cannot be read: {error}") from None
    for name, size in record.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise ValueError(f"{folder} lacks {name}") from None
        if found != size:
            raise ValueError(f"{folder / name} has {found} bytes, not the {size} that were written")
    return record


def checkpoints(output_dir: Path) -> list[Path]:
    """The folders `checkpoint-<step>`, newest step first, complete or not."""
    found = [
        (int(path.name.removeprefix(NAME_PREFIX)), path)
        for path in output_dir.glob(f"{NAME_PREFIX}*")
        if path.name.removeprefix(NAME_PREFIX).isdigit() and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def newest_complete(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint that can be resumed, and what is wrong with each newer one."""
    passed_over = []
    for folder in checkpoints(output_dir):
        try:
            read_resumable(folder)
        except ValueError as problem:
            passed_over.append(str(problem))
        else:
            return folder, passed_over
    return None, passed_over


def read_resumable(folder: Path) -> CompleteRecord:
    """As `read_complete`; raises ValueError also for one that holds the model alone."""
    record = read_complete(folder)
    if not record.resumable:
        raise ValueError(f"{folder} holds the model alone (save_only_model): training cannot go on from it")
    return record


def choose_checkpoint(wish: str | bool | None, output_dir: Path) -> tuple[Path | None, list[str]]:
    """What to resume from, and notes for the user.

    Args:
        wish: None or False: a fresh start. "auto": the newest complete checkpoint, a fresh start if there is none.
            True: the same, but there has to be one. A path: that one.

    Raises:
        ValueError: there is none, or the named one is not complete.
    """
    if wish is None or wish is False:
        return None, []
    if wish is True or wish == "auto":
        newest, passed_over = newest_complete(output_dir)
        notes = [f"passed over: {problem}" for problem in passed_over]
        if newest is None and wish is True:
            raise ValueError("; ".join([f"there is no complete checkpoint to resume from in {output_dir}", *notes]))
        return newest, notes
    folder = Path(wish)
    if not folder.is_dir():
        raise ValueError(
            f"resume_from_checkpoint is {wish!r}, but that is no folder: name a checkpoint, or 'auto' for the newest "
            "complete one in output_dir"
        )
    read_resumable(folder)
    return folder, []


def check_world_size(folder: Path, record: CompleteRecord, world_size: int) -> None:
    """Raises ValueError when another number of ranks wrote the checkpoint."""
    if record.world_size == world_size:
        return
    raise ValueError(
        f"{folder} was written by {record.world_size} training processes, this job has {world_size}: their optimizer "
        f"states and random numbers belong to {record.world_size} processes. Start {record.world_size} again (another "
        f"number of reserved GPUs or engines is no matter), or take its weights into a new run, with a new optimizer: "
        f"grpo export {folder} OUT, then --model_name_or_path OUT and another output_dir"
    )


def rotate(output_dir: Path, *, limit: int | None, keep: set[Path]) -> None:
    """Delete the oldest complete checkpoints beyond `limit`, and incomplete ones older than the newest complete one.

    The newest one that can be resumed stays whatever the limit says, and so does `keep`: the best, the newly written.
    """
    if limit is None or limit <= 0:
        return
    complete, broken = [], []
    for folder in checkpoints(output_dir):
        try:
            read_complete(folder)
        except ValueError:
            broken.append(folder)
        else:
            complete.append(folder)
    if not complete:
        return
    protected = keep | {newest_complete(output_dir)[0]}
    old = [folder for folder in reversed(complete) if folder not in protected]
    old = old[: max(0, len(complete) - limit)]
    for folder in [*old, *(b for b in broken if _step(b) < _step(complete[0]))]:
        (folder / COMPLETE_FILE).unlink(missing_ok=True)  # what is half deleted is not complete
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(output_dir: Path, *, after_step: int, name: str) -> list[Path]:
    """Move checkpoints of later steps into `output_dir/name`: another branch of the run, which nobody goes on with.

    They would otherwise be taken for the newest ones, and the new branch's for old ones.

    Returns:
        Where they are now.
    """
    moved = []
    for folder in checkpoints(output_dir):
        if _step(folder) > after_step:
            target = output_dir / name / folder.name
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                shutil.rmtree(target)
            os.rename(folder, target)
            moved.append(target)
    return moved


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(NAME_PREFIX))


def check_free_space(output_dir: Path, needed_bytes: int) -> None:
    """Raises OSError, before anything is written, when a checkpoint of that size does not fit."""
    free = shutil.disk_usage(output_dir).free
    if free < needed_bytes:
        raise OSError(
            f"a checkpoint needs about {needed_bytes / 1e9:.1f} GB, but {output_dir} has {free / 1e9:.1f} GB free: "
            "free space, or lower save_total_limit; nothing was written, the complete checkpoints are as they were"
        )
