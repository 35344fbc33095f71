"""What of a save needs no ranks: a disk that fills up, and what DeepSpeed must not put off."""

import errno
import shutil
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from grpo.checkpoints.checkpoints import newest_complete
from grpo.checkpoints.deepspeed_settings import check_deepspeed
from grpo.faults.failure import FailureRecord, JobFailed
from grpo.faults.kinds import is_users
from grpo.place.timeouts import Timeouts
from grpo.seam import saving
from grpo.seam.ordering import PromptOrder
from grpo.seam.run import JobRun
from grpo.seam.saving import reporting_a_full_disk
from tests.support.made_up_checkpoints import make


def saving_of(view: Any) -> saving.Saving:
    """Of a rank without a watch."""
    return saving.Saving(view, JobRun(view), PromptOrder(view, None))


Usage = namedtuple("Usage", "total used free")
PARTITION = "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.bin"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),  # torch 2.13's words
        RuntimeError("basic_ios::clear: iostream error"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_save_on_full_disk_names_rank_and_removes_its_files(error: Exception, rank: int, tmp_path: Path) -> None:
    six = make(tmp_path, 6)
    nine = make(tmp_path, 9, complete=False)
    words = rf"rank {rank} wrote checkpoint-9 \[GRPO-702\]: .* GB are free"
    with pytest.raises(OSError, match=words) as reported, reporting_a_full_disk(nine, rank, 2):
        raise error
    assert reported.value.errno == errno.ENOSPC
    assert f"The newest complete checkpoint is {six}" in str(reported.value)
    assert str(error) in str(reported.value)
    assert not is_users(reported.value)
    assert (nine / PARTITION).exists() is (rank == 0)  # each rank removes its own: the record needs some bytes
    assert (nine / "model.safetensors").exists() is (rank == 1)
    assert newest_complete(tmp_path) == six


def test_save_after_full_disk_on_other_rank_reraises_job_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nine = make(tmp_path, 9, complete=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 0))
    record = FailureRecord(node=0, host="a", rank=0, phase="save", cause="OSError: [Errno 28] no space left")
    with pytest.raises(JobFailed), reporting_a_full_disk(nine, 1, 2):
        raise JobFailed(record)


def test_save_error_counts_as_full_disk_only_without_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nine = make(tmp_path, 9, complete=False)
    with pytest.raises(RuntimeError, match="the model is odd"), reporting_a_full_disk(nine, 0, 2):
        raise RuntimeError("the model is odd")
    assert (nine / PARTITION).exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12, 4096))
    words = r"0\.00 GB of 1000\.00 GB are free.*RuntimeError: the writer gave up"
    with pytest.raises(OSError, match=words), reporting_a_full_disk(nine, 0, 2):
        raise RuntimeError("the writer gave up")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"checkpoint": {"writer": {"decoupled": True}}}, r"checkpoint\.writer\.decoupled is True"),
        ({"datastates_ckpt": {"host_cache_size": 16}}, r"datastates_ckpt is \{"),
        ({"datastates_ckpt": {}}, r"datastates_ckpt is \{\}"),
    ],
)
def test_check_deepspeed_with_asynchronous_writer_raises(config: dict, key: str) -> None:
    with pytest.raises(ValueError, match=rf"DeepSpeed's {key}.*Remove it"):
        check_deepspeed(config)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"checkpoint": {"tag_validation": "Warn"}},
        {"checkpoint": {"writer": {"type": "FAST", "decoupled": False}}},
        {"datastates_ckpt": False},
    ],
)
def test_check_deepspeed_with_blocking_writer_returns_none(config: dict | None) -> None:
    assert check_deepspeed(config) is None


def test_see_all_with_unshared_folder_names_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, 9, complete=False)
    monkeypatch.setattr(time, "sleep", lambda _: (folder / "rollout_state_0.pt").touch())
    saving.see_all(folder, 1)  # which it shows late
    with pytest.raises(ValueError, match=r"checkpoint-9 .*ranks \[1\] .*GRPO-708"):
        saving.see_all(folder, 2, Timeouts(visible_s=-1.0))


def test_look_at_failed_save_raises_once(tmp_path: Path) -> None:
    """At the end of a step; what then saves the last step does not meet it again."""
    fail = OSError("the disk went away")

    def wait() -> None:
        raise fail

    saves = saving_of(None)
    saves.look_at()
    last = saves._last = SimpleNamespace(is_done=False, wait=wait)  # type: ignore[assignment]
    saves.look_at()
    last.is_done = True  # type: ignore[misc]
    with pytest.raises(OSError, match="went away"):
        saves.look_at()
    saves.finish()


@pytest.mark.parametrize(
    ("deepspeed", "only_model", "parts", "gathers", "expected"),
    [
        (True, False, True, False, True),
        (True, False, True, True, False),
        (True, True, True, False, False),  # then the shards are all there is
        (True, False, False, False, False),
        (False, False, False, False, False),
    ],
)
def test_writes_only_shards_matches_deepspeed_settings(
    deepspeed: bool, only_model: bool, parts: bool, gathers: bool, expected: bool
) -> None:
    view = SimpleNamespace(
        is_deepspeed_enabled=deepspeed,
        args=SimpleNamespace(save_only_model=only_model),
        model=torch.nn.Linear(1, 1),
        model_wrapped=SimpleNamespace(
            zero_optimization_partition_weights=lambda: parts,
            zero_gather_16bit_weights_on_model_save=lambda: gathers,
        ),
    )
    saves = saving_of(view)
    assert not saves.writes_only_shards, "no checkpoint is written"
    saves._is_saving = True
    assert saves.writes_only_shards is expected
