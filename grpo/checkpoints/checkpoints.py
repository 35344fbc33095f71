"""Which checkpoints are complete: `complete.json` stands in them, written last, and every file is as it says.

No other file proves it: DeepSpeed writes `latest` before its last barrier, and after `trainer_state.json` the other
ranks still write (deepspeed 0.19, transformers 5.17).
"""

import contextlib
import errno
import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo.place.same_everywhere import read_versions
from grpo.record.durable import FileSum, make_durable, sum_of, sync_folder, write_atomically

COMPLETE_FILE = "complete.json"
PARTIAL_FILE = ".partial"  # stands in a checkpoint that we are writing, until it is complete
NAME_PREFIX = "checkpoint-"
DAMAGED_PREFIX = "damaged-"
AGAIN_S = 5.0  # behind a read that failed
# Of ranks that write: DeepSpeed's partitions, transformers' random states, ours, DeepSpeed's tensors on NVMe.
_OF_A_RANK = re.compile(
    r"(?:^|/)(?:(?:bf16_)?zero_pp_rank_|rng_state_|rollout_state_|files-|offloaded_tensors/rank)(\d+)(?=[_./])"
)


class Damaged(ValueError):
    """A checkpoint was complete, and is not as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRecord:
    """What `complete.json` holds."""

    step: int
    """Optimizer steps that are in the checkpoint."""
    world_size: int
    """Ranks that it is for: those that wrote it, or those that `grpo reshape` was asked for."""
    files: dict[str, int]
    """Size in bytes by path inside the checkpoint."""
    versions: dict[str, str]
    """Of the packages that wrote it."""
    sampling: dict[str, int]
    """The settings that say which prompts come at which step."""
    resumable: bool = True
    """False when it holds the model alone (`save_only_model`)."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 by path inside the checkpoint; a file that is not here is known by its size alone."""
    reshaped_from: int | None = None
    """Ranks that wrote what `grpo reshape` made this of."""


# -- what a rank has written ------------------------------------------------------------------------------------------


def writer_of(name: str, world_size: int) -> int:
    """The rank that writes the file of this name; 0 for what belongs to none."""
    found = _OF_A_RANK.search(name)
    return int(found[1]) if found and int(found[1]) < world_size else 0


def record_name(rank: int) -> str:
    """Of the file in which a rank says what it has written."""
    return f"files-{rank}.json"


def files_in(folder: Path) -> list[str]:
    """Paths inside a checkpoint, sorted, but for `complete.json` and hidden files."""
    return sorted(_names_in(folder, lambda name: True))


def _names_in(folder: Path, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Asks the file system about those alone that are wanted: on a network it takes its time."""
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if not path.name.startswith(".") and name != COMPLETE_FILE and is_wanted(name) and path.is_file():
            yield name


def write_rank_record(folder: Path, rank: int, world_size: int) -> None:
    """Bring what this rank has written of a checkpoint to the disk, then say so in its record.

    Raises:
        OSError: the disk is full or broken.
    """
    record = record_name(rank)
    own = sorted(_names_in(folder, lambda name: writer_of(name, world_size) == rank and name != record))
    sums = {name: make_durable(folder / name) for name in own}
    for inner in {(folder / name).parent for name in own} - {folder}:
        sync_folder(inner)
    write_atomically(folder / record, json.dumps({name: asdict(found) for name, found in sums.items()}))


def read_rank_records(folder: Path, ranks: Iterable[int]) -> tuple[dict[str, FileSum], list[int]]:
    """What these ranks say that they have written, their records too; and those whose record is not there yet."""
    sums: dict[str, FileSum] = {}
    missing = []
    for rank in ranks:
        path = folder / record_name(rank)
        try:
            reported = json.loads(path.read_text())
        except FileNotFoundError:
            missing.append(rank)
            continue
        sums |= {name: FileSum(**found) for name, found in reported.items()}
        sums[path.name] = sum_of(path)
    return sums, missing


# -- complete.json ----------------------------------------------------------------------------------------------------


def write_complete(
    folder: Path,
    *,
    step: int,
    world_size: int,
    sampling: dict[str, int],
    resumable: bool = True,
    sums: Mapping[str, FileSum] | None = None,
    reshaped_from: int | None = None,
) -> None:
    """Declare `folder` complete, atomically and durably. On one process, once every rank has written its files.

    Args:
        sums: of all files, which are on the disk. None: this process has written all that is in `folder`.
    """
    if sums is None:
        sums = {name: make_durable(folder / name) for name in files_in(folder)}
        for inner in {(folder / name).parent for name in sums}:
            sync_folder(inner)
    record = CompleteRecord(
        step=step,
        world_size=world_size,
        files={name: found.size_bytes for name, found in sums.items()},
        versions=read_versions(),
        sampling=sampling,
        resumable=resumable,
        checksums={name: found.crc32 for name, found in sums.items()},
        reshaped_from=reshaped_from,
    )
    sync_folder(folder.parent)  # its own entry, before anybody deletes older ones on its account
    write_atomically(folder / COMPLETE_FILE, json.dumps(asdict(record), indent=1))
    (folder / PARTIAL_FILE).unlink(missing_ok=True)


def read_complete(folder: Path) -> CompleteRecord:
    """The record of a complete checkpoint whose files have their sizes.

    Raises:
        Damaged: says what is missing, and in which checkpoint.
        ValueError: it was never complete.
        OSError: its file system does not answer, which says nothing about it.
    """
    names = {each.name for each in fields(CompleteRecord)}
    try:
        value: dict[str, Any] = json.loads((folder / COMPLETE_FILE).read_text())
        record = CompleteRecord(**{name: value[name] for name in names & value.keys()})
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {COMPLETE_FILE}: its writing did not come to an end") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise Damaged(f"{folder / COMPLETE_FILE} cannot be read: {error}") from None
    for name, size in record.files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{folder} lacks {name}") from None
        if found != size:
            raise Damaged(f"{folder / name} has {found} bytes, not the {size} that were written")
    return record


def read_resumable(folder: Path) -> CompleteRecord:
    """As `read_complete`; raises ValueError also for one that holds the model alone."""
    record = read_complete(folder)
    if not record.resumable:
        raise ValueError(f"{folder} holds the model alone (save_only_model): training cannot go on from it")
    return record


def verify(folder: Path, record: CompleteRecord, names: Iterable[str]) -> None:
    """Read these files of a complete checkpoint, and hold them against their checksums.

    Raises:
        Damaged: names the file that is not as it was written.
        ValueError: this process does not see it, and somebody else has.
        OSError: its file system does not answer, which says nothing about it.
    """
    for name in names:
        if name not in record.checksums:
            continue
        found = _read_twice(folder / name)
        if found != FileSum(size_bytes=record.files[name], crc32=record.checksums[name]):
            raise Damaged(
                f"{folder / name} is not as it was written: {found.size_bytes} bytes with the checksum "
                f"{found.crc32:08x}, not {record.files[name]} with {record.checksums[name]:08x} [GRPO-703]"
            )


def _read_twice(path: Path) -> FileSum:
    """Its sum; a disk that does not give a file back the second time either has lost it."""
    try:
        try:
            return sum_of(path)
        except FileNotFoundError:
            raise
        except OSError:
            time.sleep(AGAIN_S)
            return sum_of(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there on {socket.gethostname()}, and another rank has seen it: put output_dir on a "
            "file system that all nodes share, and look whether this node has it mounted"
        ) from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None


def shares(files: Mapping[str, int], world_size: int) -> list[list[str]]:
    """Who reads which file to verify it: each rank its own, and the rest shared out by size, the largest first.

    Args:
        files: size in bytes by name.

    Returns:
        Names by rank.
    """
    found: list[list[str]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for name in sorted(files, key=lambda name: (_OF_A_RANK.search(name) is None, -files[name], name)):
        rank = writer_of(name, world_size) if _OF_A_RANK.search(name) else loads.index(min(loads))
        found[rank].append(name)
        loads[rank] += files[name]
    return found


# -- which one --------------------------------------------------------------------------------------------------------


def checkpoints(output_dir: Path) -> list[Path]:
    """The folders `checkpoint-<step>`, newest step first, complete or not."""
    named = [path for path in output_dir.glob(f"{NAME_PREFIX}*") if path.name.removeprefix(NAME_PREFIX).isdecimal()]
    return sorted(filter(Path.is_dir, named), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Optimizer steps in `checkpoint-<step>`, by its name."""
    return int(folder.name.removeprefix(NAME_PREFIX))


def check_is_checkpoint(folder: Path) -> None:
    """Raises ValueError for the folder of a run, and for none at all; names the newest checkpoints beside it."""
    if inside := checkpoints(folder):
        newest = ", ".join(str(path) for path in inside[:3])
        raise ValueError(f"{folder} is the output folder of a run, not a checkpoint; its newest are: {newest}")
    if not folder.is_dir():
        beside = ", ".join(path.name for path in checkpoints(folder.parent)[:3])
        raise ValueError(f"{folder} does not exist" + (f"; the newest there are: {beside}" if beside else ""))


def newest_complete(output_dir: Path) -> Path | None:
    """The newest complete checkpoint that can be resumed."""
    for folder in checkpoints(output_dir):
        with contextlib.suppress(ValueError):
            read_resumable(folder)
            return folder
    return None


def check_world_size(folder: Path, record: CompleteRecord, world_size: int) -> None:
    """Raises ValueError when the checkpoint is for another number of ranks."""
    if record.world_size == world_size:
        return
    raise ValueError(
        f"{folder} is for {record.world_size} training processes, this job has {world_size} [GRPO-706]: optimizer "
        f"states and random numbers belong to {record.world_size} processes. Start {record.world_size} again (another "
        f"number of inference GPUs or engines is no matter), or make it one for {world_size}: "
        f"grpo reshape {folder} --ranks {world_size}"
    )


def check_reshaped(folder: Path, record: CompleteRecord, sampling: Mapping[str, int]) -> None:
    """That a checkpoint which `grpo reshape` has made goes on with the batches of the run that it is of.

    Args:
        sampling: of this job.

    Raises:
        ValueError: names the settings, and what they have to be.
    """
    if record.reshaped_from is None:
        return
    before = {"spare_groups": 0, **record.sampling}  # not in checkpoints from before there were any
    fixed = ("generation_batch_size", "num_generations", "num_iterations", "seed", "spare_groups")
    wrong = [f"{name} is {sampling[name]}, not {before[name]}" for name in fixed if sampling[name] != before[name]]
    steps, accumulation = "steps_per_generation", "gradient_accumulation_steps"
    if before[steps] * sampling[accumulation] != sampling[steps] * before[accumulation]:
        wrong.append(
            f"{steps} / {accumulation} is {sampling[steps]} / {sampling[accumulation]}, not in the proportion "
            f"{before[steps]} / {before[accumulation]}"
        )
    if wrong:
        raise ValueError(
            f"{folder} was made for {record.world_size} training processes out of one for {record.reshaped_from}, and "
            f"goes on where that was with the same batches alone, but {'; '.join(wrong)}. per_device_train_batch_size "
            f"x {record.world_size} training processes x {steps} has to be {before['generation_batch_size']}"
        )
