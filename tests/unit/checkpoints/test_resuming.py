"""Which checkpoint is taken: the newest one that is as it was written, or the one that was asked for."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo.checkpoints.checkpoints import write_complete
from grpo.checkpoints.resuming import choose
from grpo.groups.node_groups import NodeGroups
from grpo.place.launch import read_launch
from tests.support.made_up_checkpoints import make, names

OPTIMIZER = "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.bin"


def chosen(wish: str | bool | None, output_dir: Path) -> tuple[Path | None, list[str]]:
    checkpoint, notes = choose(NodeGroups(read_launch({})), wish, output_dir, 2)
    return None if checkpoint is None else checkpoint.folder, notes


@pytest.fixture(autouse=True)
def one_reads_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.checkpoints.resuming.shares", lambda files, world_size: [list(files)])


def test_choose_by_wish_returns_newest_or_named_checkpoint(tmp_path: Path) -> None:
    assert chosen("auto", tmp_path) == (None, [])
    assert chosen(None, tmp_path) == (None, [])
    with pytest.raises(ValueError, match="no complete checkpoint"):
        chosen(True, tmp_path)
    three, twelve = make(tmp_path, 3), make(tmp_path, 12)
    make(tmp_path, 20, complete=False)
    newest, (note,) = chosen("auto", tmp_path)
    assert newest == twelve  # by number, not by letters
    assert note.startswith(f"passed over: {tmp_path / 'checkpoint-20'} has no complete.json")
    assert chosen(True, tmp_path)[0] == twelve
    assert chosen(str(three), tmp_path) == (three, [])
    with pytest.raises(ValueError, match=r"checkpoint-20 has no complete\.json"):
        chosen(str(tmp_path / "checkpoint-20"), tmp_path)
    with pytest.raises(ValueError, match="name a checkpoint, or 'auto'"):
        chosen(str(tmp_path / "nowhere"), tmp_path)


def truncate(folder: Path) -> None:
    os.truncate(folder / OPTIMIZER, 9)


def flip(folder: Path) -> None:
    (folder / OPTIMIZER).write_bytes(b"0123456799")


def lose_a_rank(folder: Path) -> None:
    (folder / "files-1.json").unlink()


def lose_the_record(folder: Path) -> None:
    (folder / "complete.json").write_text("{}")


DAMAGES = {
    truncate: rf"{OPTIMIZER} has 9 bytes, not the 10",
    flip: rf"{OPTIMIZER} is not as it was written",
    lose_a_rank: r"checkpoint-9 lacks files-1\.json",
    lose_the_record: r"checkpoint-9/complete\.json cannot be read",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_choose_auto_with_damaged_newest_takes_older_and_quarantines(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    six, nine = make(tmp_path, 6), make(tmp_path, 9)
    damage(nine)
    folder, (warning,) = chosen("auto", tmp_path)
    assert folder == six
    assert warning.startswith("WARNING: ")
    assert f"It is now {tmp_path / 'damaged-checkpoint-9'}" in warning
    assert names(tmp_path) == {"checkpoint-6", "damaged-checkpoint-9"}
    assert re.search(DAMAGES[damage], warning)


@pytest.mark.parametrize("damage", DAMAGES)
def test_choose_of_named_damaged_checkpoint_raises(damage: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path, 6)
    nine = make(tmp_path, 9)
    damage(nine)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        chosen(str(nine), tmp_path)
    assert names(tmp_path) == {"checkpoint-6", "checkpoint-9"}


@pytest.mark.parametrize("wish", [True, "auto"])
def test_choose_with_all_checkpoints_damaged_raises(wish: str | bool, tmp_path: Path) -> None:
    for step, damage in ((6, truncate), (9, flip)):
        damage(make(tmp_path, step))
    reported = rf"GRPO-704.*{OPTIMIZER} .*GRPO-703.*{OPTIMIZER} has 9 bytes, not the 10"
    with pytest.raises(ValueError, match=reported):
        chosen(wish, tmp_path)
    with pytest.raises(ValueError, match=r"damaged is \S+damaged-checkpoint-6, \S+damaged-checkpoint-9\. To begin"):
        chosen(wish, tmp_path)  # the next attempt
    assert chosen(None, tmp_path) == (None, [])


def test_choose_with_model_only_checkpoint_passes_over_or_raises(tmp_path: Path) -> None:
    three, nine = make(tmp_path, 3), make(tmp_path, 9, resumable=False)
    newest, (note,) = chosen("auto", tmp_path)
    assert newest == three
    assert "checkpoint-9 holds the model alone (save_only_model)" in note
    with pytest.raises(ValueError, match="holds the model alone"):
        chosen(str(nine), tmp_path)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["rollout_state_1.pt", "global_step9/zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_choose_with_code_in_pickle_raises_without_running_it(name: str, zipped: bool, tmp_path: Path) -> None:
    """And is no damage, which one would go around: somebody has put it there."""
    run = tmp_path / "run"
    make(run, 6)
    nine = make(run, 9)
    (nine / name).parent.mkdir(exist_ok=True)
    torch.save({"step": Evil(tmp_path / "ran")}, nine / name, _use_new_zipfile_serialization=zipped)
    write_complete(nine, step=9, world_size=2, sampling={})
    with pytest.raises(ValueError, match=rf"{name} .*posix\.mkdir.*GRPO-705.*add_safe_globals"):
        chosen("auto", run)
    assert names(run) == {"checkpoint-6", "checkpoint-9"}
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "global_step9/bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt"])
def test_choose_with_unrecorded_pickle_treats_checkpoint_as_damaged(name: str, tmp_path: Path) -> None:
    """DeepSpeed and transformers look for files by name, and would run it."""
    run = tmp_path / "run"
    six, nine = make(run, 6), make(run, 9)
    (nine / name).parent.mkdir(exist_ok=True)
    torch.save({"optimizer_state_dict": Evil(tmp_path / "ran")}, nine / name)
    (nine / "notes.txt").write_text("somebody's own")
    with pytest.raises(ValueError, match=rf"checkpoint-9 holds {name}, which .*\[GRPO-713\]"):
        chosen(str(nine), run)
    folder, (warning,) = chosen("auto", run)
    assert folder == six
    assert "[GRPO-713]" in warning
    (six / "notes.txt").write_text("somebody's own")
    assert chosen("auto", run)[0] == six
    assert not (tmp_path / "ran").exists()


def test_choose_auto_with_unloadable_file_takes_older(tmp_path: Path) -> None:
    six, nine = make(tmp_path, 6), make(tmp_path, 9)
    (nine / "rollout_state_0.pt").write_bytes(b"was lost before its checksum was taken")
    write_complete(nine, step=9, world_size=2, sampling={})
    folder, (warning,) = chosen("auto", tmp_path)
    assert folder == six
    assert "rollout_state_0.pt cannot be loaded" in warning
