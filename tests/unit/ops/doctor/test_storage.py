"""Open files, space, and models and data sets that a node without network must hold already."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest

from grpo.ops.doctor import storage
from grpo.ops.doctor.records import Finding, Status
from tests.support.doctored import GIB, space

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [
        (1024, 1 << 20, "ulimit -n 65536 before the launcher"),
        (1024, 16384, "ulimit -n 16384 before the launcher"),
        (1024, resource.RLIM_INFINITY, "ulimit -n 65536 before the launcher"),
        (1024, 4096, "raise nofile in /etc/security/limits.conf"),
    ],
)
def test_check_open_files_with_low_limit_warns(soft: int, hard: int, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    finding = storage.check_open_files()
    assert (finding.status, finding.message) == (WARN, f"1024, hard limit {hard}")
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (space(100 * GIB), PASS),
        (space(100 * GIB, inodes=0, all_inodes=0), PASS),  # a file system without a fixed number of them
        (space(10 * GIB), WARN),
        (space(100 * GIB, inodes=5000), WARN),
        (space(GIB // 2), FAIL),
        (space(100 * GIB, inodes=10), FAIL),
    ],
)
def test_check_space_judges_free_bytes_and_inodes(
    found: SimpleNamespace, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    assert storage.check_space(tmp_path).status is status


def test_check_space_of_unwritable_path_fails() -> None:
    finding = storage.check_space(Path("/proc/grpo"))  # no user may make a file there
    assert finding.status is FAIL
    assert finding.message.startswith("/proc: cannot be written: ")


def test_check_space_of_missing_path_measures_existing_ancestor(tmp_path: Path) -> None:
    finding = storage.check_space(tmp_path / "runs" / "1")
    assert finding.message.startswith(f"{tmp_path}: ")
    assert not list(tmp_path.iterdir())


def test_storage_check_of_local_folder_names_missing_model_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    finding = storage.check_model(str(tmp_path))
    assert (finding.status, finding.message) == (FAIL, f"{tmp_path} lacks a tokenizer, weights")
    finding = storage.check_dataset(str(tmp_path))
    assert (finding.status, finding.message) == (PASS, f"{tmp_path}: a local path")
    (tmp_path / "tiktoken.model").touch()
    assert storage.check_model(str(tmp_path)).message == f"{tmp_path} lacks weights"


@pytest.mark.parametrize("check", [storage.check_model, storage.check_dataset], ids=["model", "dataset"])
@pytest.mark.parametrize("path", ["{}/not/mounted", "./not/mounted", "a/b/c"])
def test_storage_check_of_unmounted_path_fails_as_local_path(
    check: Callable[[str], Finding], path: str, tmp_path: Path
) -> None:
    finding = check(path.format(tmp_path))
    assert finding.status is FAIL, finding
    assert "on this node" in finding.fix


@pytest.mark.parametrize("kinds", [["linear_attention", "full_attention"], ["full_attention"]])
def test_check_model_without_linear_attention_kernels_names_packages(kinds: list[str], tmp_path: Path) -> None:
    """On a node with GPUs; on any other nothing would use them."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"layer_types": kinds}}))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert storage.check_model(str(tmp_path)).status is PASS
    finding = storage.check_model(str(tmp_path), has_gpus=True)
    assert (finding.status is PASS) is ("linear_attention" not in kinds)
    assert finding.status is PASS or finding.fix == "pip install flash-linear-attention causal-conv1d"


def go_offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As with HF_HOME=cache and HF_HUB_OFFLINE=1, which are read at import."""
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")


def test_check_model_offline_requires_complete_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online = storage.check_model("org/no-such-model")
    assert (online.status, online.message.endswith(": will be downloaded")) == (PASS, True)
    go_offline(monkeypatch, tmp_path)
    missing = storage.check_model("org/model")
    assert (missing.status, missing.fix) == (FAIL, "with network and the same HF_HOME: hf download org/model")
    assert missing.message == f"HF_HUB_OFFLINE is set, and org/model is not in the cache in {tmp_path / 'hub'}"
    model = tmp_path / "hub" / "models--org--model"
    snapshot = model / "snapshots" / "abc"
    for folder in (snapshot, model / "refs"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (snapshot / name).touch()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "lacks model-00002-of-00002" in storage.check_model("org/model").message
    (snapshot / "model-00002-of-00002.safetensors").touch()
    assert storage.check_model("org/model").status is PASS
    assert storage.check_model(str(snapshot)).status is PASS


def test_check_dataset_offline_requires_prepared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.check_dataset("org/DeepMath-103K").message == "org/DeepMath-103K: will be downloaded"
    go_offline(monkeypatch, tmp_path)
    missing = storage.check_dataset("org/DeepMath-103K")
    assert missing.status is FAIL
    assert missing.message.endswith(f"org/DeepMath-103K is not prepared in {tmp_path / 'datasets'}")
    prepared = tmp_path / "datasets" / "org___deep_math-103_k" / "default" / "0.0.0" / "abc"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text(json.dumps({"config_name": "default"}))
    found = storage.check_dataset("org/DeepMath-103K")
    assert (found.status, found.message) == (PASS, f"org/DeepMath-103K: prepared in {prepared}")
    other = prepared.parents[2] / "socratic" / "0.0.0" / "abc"
    other.mkdir(parents=True)
    (other / "dataset_info.json").write_text(json.dumps({"config_name": "socratic"}))
    assert storage.check_dataset("org/DeepMath-103K", "socratic").message.endswith(f"prepared in {other}")
    absent = storage.check_dataset("org/DeepMath-103K", "main")
    assert absent.status is FAIL
    assert absent.fix.endswith("datasets.load_dataset('org/DeepMath-103K', 'main')\"")
