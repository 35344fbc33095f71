"""`grpo export` on plain checkpoints: what it writes, what it refuses, and that a failure leaves nothing."""

import inspect
import json
import os
import pickle
import re
import shutil
import signal
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, modeling_utils

from grpo import cli
from grpo.checkpoints.checkpoints import write_complete
from grpo.checkpoints.pickles import weights_only
from grpo.ops.export.exporting import check_weights, export
from grpo.ops.export.writing import DEFAULT_SHARD_SIZE, Options
from tests.support.tiny_models import save_tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete one of a tied model, as DDP leaves it."""
    return declare_complete(save_tiny_model("qwen3-tied", tmp_path / "run" / "checkpoint-3", chat=True))


def declare_complete(folder: Path) -> Path:
    (folder / "complete.json").unlink(missing_ok=True)
    write_complete(folder, step=3, world_size=1, sampling={})
    return folder


def edit_config(checkpoint: Path, **changes) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_export_of_adapter_obeys_umask_and_checks_space_before_loading(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    adapter = tmp_path / "adapter"
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(adapter)
    (adapter / "config.json").write_text((checkpoint / "config.json").read_text())
    declare_complete(adapter)
    for name, words in {"small": {}, "merged": {"merge": True, "base": str(checkpoint)}}.items():
        export(adapter, tmp_path / name, Options(**words))
        assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / name).iterdir()} == {0o666 & ~current_umask()}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"the weights take 0.0 GB, but .* has 0.0 GB free"):
        export(adapter, tmp_path / "out", Options(merge=True, base=str(checkpoint)))
    monkeypatch.undo()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ValueError, match="export on a host with more"):
        export(adapter, tmp_path / "out", Options(merge=True, base=str(checkpoint)))
    assert not (tmp_path / "out").exists()


def test_export_of_plain_checkpoint_keeps_model_drops_training_state(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "optimizer.pt").write_bytes(b"state")
    declare_complete(checkpoint)
    out = tmp_path / "a" / "b" / "out"
    exported = export(checkpoint, out, Options())
    assert same(weights(out), weights(checkpoint))
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (exported.num_files, exported.dtypes, exported.notes) == (1, ("float32",), ())
    assert exported.num_bytes == sum(tensor.nbytes for tensor in weights(out).values())
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o666 & ~current_umask()}
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, out))
    assert after("12+34=").input_ids == before("12+34=").input_ids
    assert after.chat_template == before.chat_template
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == 1


def current_umask() -> int:
    umask = os.umask(0o22)
    os.umask(umask)
    return umask


def test_default_shard_size_matches_transformers() -> None:
    theirs = inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
    assert theirs == DEFAULT_SHARD_SIZE


def test_export_with_shards_and_dtype_casts_and_splits_weights(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is free
    exported = export(checkpoint, out, Options(dtype=torch.bfloat16, max_shard_size="200KB"))
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) == exported.num_files > 2
    assert all(shard.stat().st_size < 210_000 for shard in shards)
    assert same(weights(out), {name: tensor.bfloat16() for name, tensor in weights(checkpoint).items()})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights(out).keys()
    assert index["metadata"]["total_size"] == exported.num_bytes
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    again = tmp_path / "again"
    declare_complete(out)
    export(out, again, Options())  # from shards to one file
    assert same(weights(again), weights(out))


def test_export_of_mixed_dtypes_keeps_them(checkpoint: Path, tmp_path: Path) -> None:
    mixed = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in weights(checkpoint).items()}
    save_file(mixed, checkpoint / "model.safetensors")
    edit_config(checkpoint, dtype="bfloat16")
    exported = export(declare_complete(checkpoint), tmp_path / "out", Options())
    assert exported.dtypes == ("bfloat16", "float32")
    assert same(weights(tmp_path / "out"), mixed)


def test_export_of_duplicated_tied_weight_writes_it_once(checkpoint: Path, tmp_path: Path) -> None:
    single = weights(checkpoint)
    twice = single | {"lm_head.weight": single["model.embed_tokens.weight"].clone()}
    save_file(twice, checkpoint / "model.safetensors")
    export(declare_complete(checkpoint), tmp_path / "out", Options())
    assert same(weights(tmp_path / "out"), single)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_export_of_unfinished_checkpoint_requires_allow_incomplete(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (checkpoint / "complete.json").unlink()
    command = ["export", str(checkpoint), str(tmp_path / "out")]
    assert cli.main(command) == 1
    refusal = capsys.readouterr().err
    assert f"{checkpoint} has no complete.json" in refusal
    assert "was not finished" in refusal
    assert "--allow-incomplete" in refusal
    assert not (tmp_path / "out").exists()
    assert cli.main([*command, "--allow-incomplete"]) == 0
    said = capsys.readouterr()
    assert "has no complete.json" in said.err
    assert "holds no tokenizer" not in said.err
    assert said.out.startswith(f"{tmp_path / 'out'}: 0.001 GB of float32 in 1 file(s), from 1 safetensors file(s)")


def test_export_of_damaged_weights_file_names_it(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 8)
    with pytest.raises(ValueError, match=rf"model\.safetensors has {size - 8} bytes, not the {size}.*--allow-incompl"):
        export(checkpoint, tmp_path / "out", Options())
    with pytest.raises(ValueError, match=r"the weights in .*checkpoint-3 cannot be read: SafetensorError"):
        export(checkpoint, tmp_path / "out", Options(allow_incomplete=True))
    content = bytearray(file.read_bytes())
    file.write_bytes(bytes([*content[:-1], content[-1] ^ 1]) + bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors is not as it was written"):
        export(checkpoint, tmp_path / "out", Options())
    file.unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        export(checkpoint, tmp_path / "out", Options())
    with pytest.raises(ValueError, match=r"holds no weights: neither model\*\.safetensors"):
        export(checkpoint, tmp_path / "out", Options(allow_incomplete=True))


def test_export_of_folder_without_model_raises(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json: give a checkpoint-<step> folder"):
        export(tmp_path / "empty", tmp_path / "out", Options())
    (checkpoint / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=r"the adapter's weights in .* cannot be read: No such file"):
        export(checkpoint, tmp_path / "out", Options())


def test_export_into_nonempty_folder_raises(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(ValueError, match=rf"{out} is not empty: give a folder that is new or empty, or remove it"):
        export(checkpoint, out, Options())
    with pytest.raises(ValueError, match=r"precious is a file: give a folder"):
        export(checkpoint, out / "precious", Options())
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_export_with_little_disk_or_memory_raises_first(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(OSError, match=rf"take 0\.0 GB, but {tmp_path} has 0\.0 GB free: free space, or give an"):
            export(checkpoint, tmp_path / "not" / "yet" / "there", Options())
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=300_000))
        with pytest.raises(ValueError, match=r"takes 0\.0 GB of memory .* this host has 0\.0 GB available: export"):
            export(checkpoint, tmp_path / "out", Options(dtype=torch.bfloat16))
        export(checkpoint, tmp_path / "out", Options())  # what is not cast stays in its file until it is written


def test_export_with_mismatched_config_or_bad_option_raises(checkpoint: Path, tmp_path: Path) -> None:
    edit_config(checkpoint, intermediate_size=264)
    here = sum(tensor.numel() for tensor in weights(checkpoint).values())
    wanted = here + 2 * 3 * 8 * 128
    with pytest.raises(ValueError, match=rf"a Qwen3ForCausalLM, but .* has {here} elements of weights, not {wanted}$"):
        export(declare_complete(checkpoint), tmp_path / "out", Options())
    edit_config(checkpoint, intermediate_size=256, dtype=None)
    with pytest.raises(ValueError, match=r"does not say in which dtype .*: give --dtype"):
        export(declare_complete(checkpoint), tmp_path / "out", Options())
    with pytest.raises(ValueError, match="max_shard_size is 'much', write it like 500MB"):
        export(checkpoint, tmp_path / "out", Options(dtype=torch.float32, max_shard_size="much"))
    assert not (tmp_path / "out").exists()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "files",
    [
        ["mp_rank_00_model_states.pt"],
        ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    ],
)
def test_export_of_malicious_pickle_runs_no_code(
    files: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "latest").write_text("global_step3")
    (checkpoint / "global_step3").mkdir()
    for name in files:
        torch.save({"module": {"a": Evil(tmp_path / "ran")}}, checkpoint / "global_step3" / name)
    declare_complete(checkpoint)
    assert cli.main(["export", str(checkpoint), str(tmp_path / "out")]) == 1
    assert re.search(rf"{files[0]} .*posix\.mkdir.*\[GRPO-705\]", capsys.readouterr().err)
    assert not (tmp_path / "ran").exists()
    with weights_only(), pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        torch.load(checkpoint / "global_step3" / files[0], weights_only=False)  # as DeepSpeed asks for it
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", ["error", "SIGTERM"])
def test_export_after_failure_leaves_no_partial_output(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    original = modeling_utils.safe_save_file

    def fail_at_the_second_file(tensors: dict[str, torch.Tensor], path: str, **kwargs: Any) -> None:
        if not list(there.glob("*/model-00001*")):
            return original(tensors, path, **kwargs)
        if how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        raise OSError("the disk went away")

    monkeypatch.setattr(modeling_utils, "safe_save_file", fail_at_the_second_file)
    there = tmp_path / "there"
    there.mkdir()
    handler = signal.getsignal(signal.SIGTERM)
    command = ["export", str(checkpoint), str(there / "out"), "--max-shard-size", "100KB"]
    if how == "SIGTERM":
        with pytest.raises(SystemExit, match="143"):
            cli.main(command)
    else:
        assert cli.main(command) == 1
    assert list(there.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_export_of_checkpoint_without_tokenizer_adds_note(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer_config.json").unlink()
    declare_complete(checkpoint)
    (note,) = export(checkpoint, tmp_path / "out", Options()).notes
    assert note == f"{checkpoint} holds no tokenizer: the export has none either"


def test_check_weights_names_missing_extra_and_misshapen() -> None:
    expected = {"a": torch.empty(2, 3), "b": torch.empty(4)}
    check_weights(torch.nn.Linear(1, 1), expected, {**expected}, as_saved=False)
    found = {"b": torch.empty(5), "c": torch.empty(1)}
    message = "a Linear, but the checkpoint lacks a and has besides c and has in another shape b$"
    with pytest.raises(ValueError, match=message):
        check_weights(torch.nn.Linear(1, 1), expected, found, as_saved=False)
    with pytest.raises(ValueError, match="has 6 elements of weights, not 10"):
        check_weights(torch.nn.Linear(1, 1), expected, found, as_saved=True)
