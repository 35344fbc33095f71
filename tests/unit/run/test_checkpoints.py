"""What counts as a complete checkpoint, which one is resumed, and which ones are deleted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo.run.checkpoints import (
    check_free_space,
    check_world_size,
    choose_checkpoint,
    newest_complete,
    read_complete,
    rotate,
    set_aside,
    write_complete,
)

FILES = [
    "model.safetensors",
    "trainer_state.json",
    "scheduler.pt",
    "rng_state_0.pth",
    "rollout_state_1.pt",
    "latest",
    "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
]


def make(output_dir: Path, step: int, *, complete: bool = True) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"0123456789")
    if complete:
        write_complete(folder, step=step, world_size=2, sampling={"seed": 42})
    return folder


def test_the_record_names_everything(tmp_path: Path) -> None:
    record = read_complete(make(tmp_path, 3))
    assert (record.step, record.world_size) == (3, 2)
    assert record.files == dict.fromkeys(sorted(FILES), 10)
    assert record.versions["torch"]
    assert not list(tmp_path.glob("**/.complete*"))  # no draft is left


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_missed(name: str, tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = make(tmp_path, 6)
    (folder / name).unlink()
    assert newest_complete(tmp_path) == (tmp_path / "checkpoint-3", [f"{folder} lacks {name}"])


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_seen(name: str, tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = make(tmp_path, 6)
    (folder / name).write_bytes(b"012345678")
    newest, (problem,) = newest_complete(tmp_path)
    assert newest == tmp_path / "checkpoint-3"
    assert problem == f"{folder / name} has 9 bytes, not the 10 that were written"


def spoil_json(folder: Path) -> None:
    (folder / "complete.json").write_text('{"step": 6')


def spoil_fields(folder: Path) -> None:
    (folder / "complete.json").write_text(json.dumps({"step": 6}))


def remove(folder: Path) -> None:
    (folder / "complete.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"), [(spoil_json, "cannot be read"), (spoil_fields, "cannot be read"), (remove, "did not come to")]
)
def test_without_a_record_it_is_not_complete(spoil: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = make(tmp_path, 6)
    spoil(folder)
    newest, (problem,) = newest_complete(tmp_path)
    assert newest == tmp_path / "checkpoint-3"
    assert words in problem
    assert str(folder) in problem


def test_what_is_resumed(tmp_path: Path) -> None:
    assert choose_checkpoint("auto", tmp_path) == (None, [])
    assert choose_checkpoint(None, tmp_path) == (None, [])
    with pytest.raises(ValueError, match="no complete checkpoint"):
        choose_checkpoint(True, tmp_path)
    three, twelve = make(tmp_path, 3), make(tmp_path, 12)
    make(tmp_path, 20, complete=False)
    (tmp_path / "checkpoint-best").mkdir()
    newest, (note,) = choose_checkpoint("auto", tmp_path)
    assert newest == twelve  # by number, not by letters
    assert "checkpoint-20" in note
    assert choose_checkpoint(True, tmp_path)[0] == twelve
    assert choose_checkpoint(str(three), tmp_path) == (three, [])
    with pytest.raises(ValueError, match=r"checkpoint-20 has no complete\.json"):
        choose_checkpoint(str(tmp_path / "checkpoint-20"), tmp_path)
    with pytest.raises(ValueError, match="name a checkpoint, or 'auto'"):
        choose_checkpoint(str(tmp_path / "nowhere"), tmp_path)


def test_another_number_of_ranks_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    check_world_size(folder, read_complete(folder), 2)
    with pytest.raises(
        ValueError, match=r"written by 2 training processes, this job has 4.*grpo export .*/checkpoint-3"
    ):
        check_world_size(folder, read_complete(folder), 4)


def names(output_dir: Path) -> set[str]:
    return {path.name for path in output_dir.iterdir()}


def test_the_newest_complete_one_is_never_deleted(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        make(tmp_path, step)
    make(tmp_path, 7, complete=False)
    make(tmp_path, 12, complete=False)  # being written by nobody any more, but newer: left to look at
    rotate(tmp_path, limit=None, keep=set())
    assert len(names(tmp_path)) == 5
    rotate(tmp_path, limit=2, keep=set())
    assert names(tmp_path) == {"checkpoint-6", "checkpoint-9", "checkpoint-12"}
    rotate(tmp_path, limit=1, keep={tmp_path / "checkpoint-6"})
    assert names(tmp_path) == {"checkpoint-6", "checkpoint-9", "checkpoint-12"}  # the best one stays beside it
    rotate(tmp_path, limit=1, keep=set())
    assert names(tmp_path) == {"checkpoint-9", "checkpoint-12"}


def test_a_model_alone_is_rotated_but_not_resumed(tmp_path: Path) -> None:
    three = make(tmp_path, 3)
    for step in (6, 9):
        write_complete(make(tmp_path, step, complete=False), step=step, world_size=2, sampling={}, resumable=False)
    newest, notes = choose_checkpoint("auto", tmp_path)
    assert newest == three
    assert len(notes) == 2
    assert "checkpoint-9 holds the model alone (save_only_model)" in notes[0]
    with pytest.raises(ValueError, match="holds the model alone"):
        choose_checkpoint(str(tmp_path / "checkpoint-9"), tmp_path)
    rotate(tmp_path, limit=2, keep={tmp_path / "checkpoint-9"})
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-9"}


def test_another_branch_is_set_aside(tmp_path: Path) -> None:
    """Else its later steps would count as the newest, and what the new branch writes would be deleted as old."""
    for step in (3, 480, 500):
        make(tmp_path, step)
    moved = set_aside(tmp_path, after_step=3, name="abandoned.attempt-0")
    assert {path.name for path in moved} == {"checkpoint-480", "checkpoint-500"}
    assert names(tmp_path) == {"checkpoint-3", "abandoned.attempt-0"}
    read_complete(tmp_path / "abandoned.attempt-0" / "checkpoint-500")
    make(tmp_path, 10)
    rotate(tmp_path, limit=1, keep={tmp_path / "checkpoint-10"})
    assert newest_complete(tmp_path) == (tmp_path / "checkpoint-10", [])
    assert set_aside(tmp_path, after_step=10, name="abandoned.attempt-1") == []


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    check_free_space(tmp_path, 1)
    with pytest.raises(OSError, match=r"needs about 1000000\.0 GB.*nothing was written"):
        check_free_space(tmp_path, 10**15)


def test_what_was_set_aside_under_this_name_before_is_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        (make(tmp_path, 5) / "note").write_text(text)
        (moved,) = set_aside(tmp_path, after_step=3, name="abandoned.attempt-0")
    assert (moved / "note").read_text() == "new"


def test_nothing_is_rotated_before_one_is_complete(tmp_path: Path) -> None:
    make(tmp_path, 3, complete=False)
    rotate(tmp_path, limit=1, keep=set())
    assert names(tmp_path) == {"checkpoint-3"}
