"""Choice of the checkpoint to resume: the newest one with all files unchanged.

All ranks read their shares, and take the same decision. A damaged checkpoint is quarantined, and the one before it is
used; a checkpoint requested by name is never replaced by another.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo.checkpoints.checkpoints import (
    CompleteRecord,
    Damaged,
    check_world_size,
    checkpoints,
    read_resumable,
    shares,
    verify,
)
from grpo.checkpoints.pickles import check_pickle
from grpo.checkpoints.rotation import damaged_in, quarantine_damaged
from grpo.groups.node_groups import NodeGroups

MEET_S = 300.0  # while files are read, which depends on the disk's speed
_REFUSED = "refused: "
# Files that a resume unpickles; callbacks of users may add their own files.
_LOADED = re.compile(
    r"(_optim_states|_model_states|rollout_state_\d+|/?optimizer|/?scheduler|/?scaler)\.pt$|rng_state(_\d+)?\.pth$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteCheckpoint:
    """A resumable checkpoint."""

    folder: Path
    record: CompleteRecord


def named_checkpoint(wish: str) -> CompleteCheckpoint:
    """Return the checkpoint requested by name.

    Raises:
        ValueError: there is none, or it is not complete.
    """
    folder = Path(wish)
    if not folder.is_dir():
        raise ValueError(
            f"resume_from_checkpoint is {wish!r}, but that is no folder: name a checkpoint, or 'auto' for the newest "
            "complete one in output_dir"
        )
    return CompleteCheckpoint(folder=folder, record=read_resumable(folder))


def newest_checkpoint(
    output_dir: Path, *, has_to_be: bool, reported: Sequence[str]
) -> tuple[CompleteCheckpoint | None, list[str]]:
    """Return the newest complete checkpoint, and notes for the user. Quarantines newer damaged ones.

    Args:
        has_to_be: a fresh start is not acceptable.
        reported: earlier notes, for the error.

    Raises:
        ValueError: there is none left, or none although required.
    """
    notes = []
    for folder in checkpoints(output_dir):
        try:
            record = read_resumable(folder)
        except Damaged as problem:
            notes.append(quarantine_saying(folder, str(problem)))
        except ValueError as problem:
            notes.append(f"passed over: {problem}")
        else:
            return CompleteCheckpoint(folder=folder, record=record), notes
    if damaged := damaged_in(output_dir):
        names = ", ".join(str(folder) for folder in damaged)
        none_left = (
            f"no checkpoint is left to go on from in {output_dir} [GRPO-704]: damaged is {names}. To begin afresh, set "
            "another output_dir, or remove what is damaged"
        )
        raise ValueError("; ".join([none_left, *reported, *notes]))
    if has_to_be:
        raise ValueError("; ".join([f"there is no complete checkpoint to resume from in {output_dir}", *notes]))
    return None, notes


def quarantine_saying(folder: Path, problem: str) -> str:
    """Quarantine a damaged checkpoint; return the warning."""
    return f"WARNING: {problem}. It is now {quarantine_damaged(folder)}, and the checkpoint before it is taken"


def choose(
    groups: NodeGroups,
    wish: str | bool | None,
    output_dir: Path,
    world_size: int,
    *,
    known: CompleteCheckpoint | None = None,
) -> tuple[CompleteCheckpoint | None, list[str]]:
    """Choose the checkpoint to resume; returns it with notes for the user. Collective: rank 0 searches, all read.

    Args:
        wish: None or False: a fresh start. "auto": the newest complete checkpoint, or a fresh start if there never was
            one. True: the same, but there must be one. A path: that checkpoint.
        known: a checkpoint already read.

    Raises:
        ValueError: there is none, the named one is incomplete or damaged, or it does not fit this job.
    """
    notes: list[str] = []
    if wish is None or wish is False:
        return None, notes

    is_named = wish is not True and wish != "auto"

    def look() -> tuple[CompleteCheckpoint | None, list[str]]:
        checkpoint, found = (
            (named_checkpoint(str(wish)), [])
            if is_named
            else newest_checkpoint(output_dir, has_to_be=wish is True, reported=notes)
        )
        if checkpoint is not None:
            check_world_size(checkpoint.folder, checkpoint.record, world_size)
        return checkpoint, found

    while True:
        checkpoint, found = groups.by_rank_zero(look, tuple[CompleteCheckpoint | None, list[str]])
        notes += found
        if checkpoint is None or checkpoint == known:
            return checkpoint, notes
        names = shares(checkpoint.record.files, world_size)[groups.topology.rank]
        problems = [text for text in _problems_of(groups, checkpoint, names) if text]
        if not problems:
            return checkpoint, notes
        if refused := [text for text in problems if text.startswith(_REFUSED)]:
            raise ValueError(refused[0].removeprefix(_REFUSED))
        problem = "; ".join(problems)
        if is_named:
            raise ValueError(f"{problem}. This checkpoint was asked for by name: name another one, or 'auto'")
        notes.append(groups.by_rank_zero(partial(quarantine_saying, checkpoint.folder, problem), str))


def _problems_of(groups: NodeGroups, checkpoint: CompleteCheckpoint, names: list[str]) -> list[str]:
    """Check all files, each rank its share; returns one problem per rank, '' if none. Collective.

    Ranks synchronise in between, so that none waits longer than its group's timeout.
    """
    left, mine = list(names), _unlisted(checkpoint) if groups.topology.rank == 0 else ""
    while groups.largest(len(left)):
        begun = time.monotonic()
        while left and time.monotonic() - begun < MEET_S:
            name = left.pop()
            mine = mine or _problem_of(checkpoint, name)
    return groups.all_gather(mine)


def _unlisted(checkpoint: CompleteCheckpoint) -> str:
    """Report files that a resume would unpickle although `complete.json` does not list them: libraries find files by
    name."""
    folder = checkpoint.folder
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    more = [name for name in found if _LOADED.search(name) and name not in checkpoint.record.files]
    return f"{folder} holds {', '.join(more)}, which its complete.json does not list [GRPO-713]" if more else ""


def _problem_of(checkpoint: CompleteCheckpoint, name: str) -> str:
    """Problem with a file; '' if there is none."""
    try:
        verify(checkpoint.folder, checkpoint.record, [name])
    except Damaged as problem:
        return str(problem)
    if not _LOADED.search(name):
        return ""
    try:
        check_pickle(checkpoint.folder / name)
    except ValueError as problem:
        return f"{_REFUSED}{problem}"
    except (OSError, RuntimeError, EOFError) as problem:
        return f"{checkpoint.folder / name} cannot be loaded: {problem}"
    return ""
