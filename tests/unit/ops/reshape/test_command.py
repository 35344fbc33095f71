"""`grpo reshape` on checkpoints without DeepSpeed: what it makes, and what it refuses."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from grpo import cli
from grpo.checkpoints.checkpoints import CompleteRecord, read_complete, verify
from grpo.ops.reshape.command import default_out
from grpo.ops.reshape.reshaping import batch_settings, reshape
from tests.support.made_up_checkpoints import SAMPLING, make_reshapable


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of two ranks by DDP, after two generation batches."""
    return make_reshapable(tmp_path / "run" / "checkpoint-2", step=6)


def random_file(folder: Path, name: str) -> dict:
    return torch.load(folder / name, weights_only=False)


def test_reshape_keeps_rng_of_ranks_and_seeds_new_ones(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "checkpoint-2"
    settings = reshape(checkpoint, out, ranks=4)
    assert (settings["per_device_train_batch_size"], settings["steps_per_generation"]) == (3, 2)
    record = read_complete(out)
    verify(out, record, record.files)
    assert (record.world_size, record.reshaped_from, record.sampling) == (4, 2, SAMPLING)
    assert sorted(record.files) == [
        "model.safetensors",
        *(f"rng_state_{rank}.pth" for rank in range(4)),
        *(f"rollout_state_{rank}.pt" for rank in range(4)),
    ]
    states = [random_file(out, f"rng_state_{rank}.pth") for rank in range(4)]
    for rank in (0, 1):
        assert states[rank]["python"] == random.Random(rank).getstate()
    assert len({state["python"][1] for state in states}) == 4
    assert len({tuple(state["cpu"].tolist()) for state in states}) == 4
    assert len({tuple(state["cuda"][0].tolist()) for state in states}) == 4
    assert torch.load(out / "rollout_state_3.pt") == {
        **{"generation_batches": 2, "batch": None, "reference": None, "ahead": None}
    }
    again = tmp_path / "again" / "checkpoint-2"
    reshape(out, again, ranks=1)  # and on from there
    assert read_complete(again).reshaped_from == 2
    assert random_file(again, "rng_state.pth")["python"] == random.Random(0).getstate()
    assert torch.load(again / "rollout_state_0.pt")["generation_batches"] == 2


def test_reshape_default_out_is_beside_run_and_not_overwritten(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = checkpoint.parent.with_name("run-ranks-3") / "checkpoint-2"
    assert default_out(checkpoint, 3) == out
    assert cli.main(["reshape", str(checkpoint), "--ranks", "3"]) == 0
    assert capsys.readouterr().out == (
        f"{out}: for 3 training processes. Go on with per_device_train_batch_size: 4, steps_per_generation: 2, "
        "gradient_accumulation_steps: 2\n"
    )
    assert out.parent.stat().st_mode & 0o777 == 0o700, "a run goes on in it"
    assert cli.main(["reshape", str(checkpoint), "--ranks", "3"]) == 1
    assert f"{out} is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "steps", "accumulation", "expected"),
    [
        (1, 3, 3, (4, 6, 6)),
        (3, 3, 3, (4, 2, 2)),
        (6, 3, 3, (4, 1, 1)),
        (8, 3, 3, (3, 1, 1)),
        (24, 3, 3, (1, 1, 1)),
        (3, 6, 3, (2, 4, 2)),  # two optimizer steps to a generation batch, as before
        (12, 6, 3, (1, 2, 1)),
        (24, 6, 3, None),  # one micro-batch, and two optimizer steps of it
        (5, 3, 3, None),
    ],
)
def test_batch_settings_for_other_ranks_keep_generation_batch(
    ranks: int, steps: int, accumulation: int, expected: tuple[int, int, int] | None
) -> None:
    sampling = {**SAMPLING, "steps_per_generation": steps, "gradient_accumulation_steps": accumulation}
    record = CompleteRecord(step=2, world_size=2, files={}, versions={}, sampling=sampling)
    if expected is None:
        with pytest.raises(ValueError, match=rf"{ranks} training processes cannot share generation batches of 24"):
            batch_settings(record, ranks)
        return
    assert tuple(batch_settings(record, ranks).values()) == expected


def test_reshape_within_generation_batch_raises(tmp_path: Path) -> None:
    folder = make_reshapable(tmp_path / "run" / "checkpoint-2", step=7, batch=[])
    with pytest.raises(ValueError, match=r"GRPO-707\]: 1 of its 3 micro-batches .*a multiple"):
        reshape(folder, tmp_path / "out", ranks=3)
    assert not (tmp_path / "out").exists()


def test_reshape_with_bad_ranks_or_damaged_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is for 2 training processes already"):
        reshape(checkpoint, tmp_path / "out", ranks=2)
    with pytest.raises(ValueError, match="--ranks is 0"):
        reshape(checkpoint, tmp_path / "out", ranks=0)
    (checkpoint / "model.safetensors").write_bytes(b"weighty")
    assert cli.main(["reshape", str(checkpoint), "--ranks", "3", "--out", str(tmp_path / "out")]) == 1
    assert "model.safetensors is not as it was written" in capsys.readouterr().err
    (checkpoint / "complete.json").unlink()
    with pytest.raises(ValueError, match=r"has no complete\.json"):
        reshape(checkpoint, tmp_path / "out", ranks=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_reshape_on_full_disk_or_into_file_raises(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: give an --out"):
        reshape(checkpoint, tmp_path / "file", ranks=3)
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=rf"takes 0\.0 GB, but {tmp_path} has 0\.0 GB free: free space, or give an --out"):
        reshape(checkpoint, tmp_path / "out", ranks=3)


def test_reshape_on_sigterm_removes_partial_output(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("grpo.ops.reshape.reshaping.write_complete", end)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        cli.main(["reshape", str(checkpoint), "--ranks", "3", "--out", str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert signal.getsignal(signal.SIGTERM) is handler
