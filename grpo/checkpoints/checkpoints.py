"""Completeness of checkpoints: `complete.json` is written last, and every file matches it.

No other file is a sign of completeness: DeepSpeed writes `latest` before its last barrier, and other ranks still write
after `trainer_state.json` (deepspeed 0.19, transformers 5.17).
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
PARTIAL_FILE = ".partial"  # exists in a checkpoint of ours until it is complete
NAME_PREFIX = "checkpoint-"
DAMAGED_PREFIX = "damaged-"
AGAIN_S = 5.0  # after a failed read
# Files of single ranks: DeepSpeed's partitions, transformers' random states, ours, DeepSpeed's tensors on NVMe.
_OF_A_RANK = re.compile(
    r"(?:^|/)(?:(?:bf16_)?zero_pp_rank_|rng_state_|rollout_state_|files-|offloaded_tensors/rank)(\d+)(?=[_./])"
)


class Damaged(ValueError):
    """A checkpoint was complete, and has changed since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteRecord:
    """Content of `complete.json`.

    Example:
        CompleteRecord(step=120, world_size=8, files={"config.json": 726}, versions={"torch": "2.13.0"},
                       sampling={"num_generations": 8}, checksums={"config.json": 2774283521})
    """

    step: int
    """Optimizer steps in the checkpoint."""
    world_size: int
    """Number of ranks to resume with: the writers', or the one given to `grpo reshape`."""
    files: dict[str, int]
    """Size in bytes by path inside the checkpoint."""
    versions: dict[str, str]
    """Package versions at the time of writing."""
    sampling: dict[str, int]
    """Settings that determine the prompts of each step."""
    resumable: bool = True
    """False if it has only the model (`save_only_model`)."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 by path inside the checkpoint; other files are checked by size alone."""
    reshaped_from: int | None = None
    """Number of ranks before `grpo reshape`."""


# -- files of a rank ----------------------------------------------------------------------------------------------


def writer_of(name: str, world_size: int) -> int:
    """Rank that writes the file of this name; 0 for common files."""
    found = _OF_A_RANK.search(name)
    return int(found[1]) if found and int(found[1]) < world_size else 0


def record_name(rank: int) -> str:
    """Name of a rank's record of its files."""
    return f"files-{rank}.json"


def files_in(folder: Path) -> list[str]:
    """Paths inside a checkpoint, sorted, except `complete.json` and hidden files."""
    return sorted(_names_in(folder, lambda name: True))


def _names_in(folder: Path, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield matching names; queries the file system only for these, because networked ones are slow."""
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if not path.name.startswith(".") and name != COMPLETE_FILE and is_wanted(name) and path.is_file():
            yield name


def write_rank_record(folder: Path, rank: int, world_size: int) -> None:
    """Flush this rank's files of a checkpoint to disk, then write its record.

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
    """Return the checksums in these ranks' records and of the records themselves, and the ranks without a record
    yet."""
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
    """Declare `folder` complete, atomically and durably. On one process, after every rank has written its files.

    Args:
        sums: of all files, already on disk. None: this process has written everything in `folder`.
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
    sync_folder(folder.parent)  # the folder's own entry, before older ones are deleted
    write_atomically(folder / COMPLETE_FILE, json.dumps(asdict(record), indent=1))
    (folder / PARTIAL_FILE).unlink(missing_ok=True)


def read_complete(folder: Path) -> CompleteRecord:
    """Read the record of a complete checkpoint, and check its files' sizes.

    Raises:
        Damaged: names the missing file or field, and the checkpoint.
        ValueError: it was never complete.
        OSError: its file system does not answer; the checkpoint may be well.
    """
    names = {each.name for each in fields(CompleteRecord)}
    try:
        value: dict[str, Any] = json.loads((folder / COMPLETE_FILE).read_text())
        record = CompleteRecord(**{name: value[name] for name in names & value.keys()})
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {COMPLETE_FILE}: it was not written to its end") from None
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
    """Call `read_complete`; also raises ValueError for a checkpoint of the model alone."""
    record = read_complete(folder)
    if not record.resumable:
        raise ValueError(f"{folder} holds the model alone (save_only_model): training cannot go on from it")
    return record


def verify(folder: Path, record: CompleteRecord, names: Iterable[str]) -> None:
    """Read these files of a complete checkpoint, and compare their checksums.

    Raises:
        Damaged: names the changed file.
        ValueError: the file is visible to another process, but not to this one.
        OSError: its file system does not answer; the checkpoint may be well.
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
    """Checksum of a file; read errors are retried once, a second one means lost data."""
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
    """Assign files to ranks for verification: each rank its own, the rest by size, the largest first.

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


# -- choice -----------------------------------------------------------------------------------------------------


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-<step>`, newest step first, complete or not."""
    named = [path for path in output_dir.glob(f"{NAME_PREFIX}*") if path.name.removeprefix(NAME_PREFIX).isdecimal()]
    return sorted(filter(Path.is_dir, named), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Optimizer steps in `checkpoint-<step>`, by its name."""
    return int(folder.name.removeprefix(NAME_PREFIX))


def check_is_checkpoint(folder: Path) -> None:
    """Raise ValueError for a run's folder, or a missing one; names the newest checkpoints there."""
    if inside := checkpoints(folder):
        newest = ", ".join(str(path) for path in inside[:3])
        raise ValueError(f"{folder} is the output folder of a run, not a checkpoint; its newest are: {newest}")
    if not folder.is_dir():
        beside = ", ".join(path.name for path in checkpoints(folder.parent)[:3])
        raise ValueError(f"{folder} does not exist" + (f"; the newest there are: {beside}" if beside else ""))


def newest_complete(output_dir: Path) -> Path | None:
    """Newest complete, resumable checkpoint; None if there is none."""
    for folder in checkpoints(output_dir):
        with contextlib.suppress(ValueError):
            read_resumable(folder)
            return folder
    return None


def check_world_size(folder: Path, record: CompleteRecord, world_size: int) -> None:
    """Raise ValueError if the checkpoint is for another number of ranks."""
    if record.world_size == world_size:
        return
    raise ValueError(
        f"{folder} is for {record.world_size} training processes, this job has {world_size} [GRPO-706]: optimizer "
        f"states and random numbers belong to {record.world_size} processes. Start {record.world_size} again (another "
        f"number of inference GPUs or engines is no matter), or make it one for {world_size}: "
        f"grpo reshape {folder} --ranks {world_size}"
    )


def check_reshaped(folder: Path, record: CompleteRecord, sampling: Mapping[str, int]) -> None:
    """Check that a reshaped checkpoint continues with the batches of its run.

    Args:
        sampling: of this job.

    Raises:
        ValueError: names the settings, and their required values.
    """
    if record.reshaped_from is None:
        return
    before = {"spare_groups": 0, **record.sampling}  # not in checkpoints written before the option existed
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
