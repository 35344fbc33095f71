"""`grpo init` from a wheel, with no checkout on the path: its script trains two steps, without the wing of tools."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.launching import ROOT, free_port, start
from tests.support.tiny_models import save_tiny_model

BUILD_S, JOB_S = 300, 360
SOURCES = ("grpo", "configs", "launch", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path) -> str:
    """What it printed, with no checkout on the path."""
    env = {**os.environ, "PYTHONPATH": ""}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=BUILD_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which the wheel is installed, beside what this one has but for its own `grpo`."""
    folder = tmp_path_factory.mktemp("installed")
    sources = folder / "sources"  # a build leaves files behind
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, sources)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sources, cwd=folder)
    shutil.rmtree(sources)
    (wheel,) = folder.glob("*.whl")
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    run(*pip, "--python", venv / "bin" / "python", "install", "--no-deps", wheel, cwd=folder)
    (own,) = venv.glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and the .pth files in it, an editable install's too, are not read.
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def test_the_folder_trains_without_a_checkout_and_without_the_tools(installed: Path, tmp_path: Path) -> None:
    python = installed / "bin" / "python"
    assert run(python, "-c", "import grpo; print(grpo.__file__)", cwd=tmp_path).startswith(str(installed))
    mine = tmp_path / "mine"
    run(installed / "bin" / "grpo", "init", mine, cwd=tmp_path)
    assert os.access(mine / "launch" / "local_2node.sh", os.X_OK)

    (package,) = installed.glob("lib/python*/site-packages/grpo")
    shutil.rmtree(package / "ops")

    model = save_tiny_model("qwen3-tied", tmp_path / "model", chat=True)
    output_dir = mine / "runs" / "first"
    launcher = [str(python), "-m", "accelerate.commands.launch", "--config_file", str(mine / "configs" / "cpu.yaml")]
    script = [str(mine / "train.py"), "--model", str(model), "--bf16", "false", "--max_steps", "2"]
    flags = ["--max_completion_length", "8", "--output_dir", str(output_dir), "--gradient_accumulation_steps", "1"]
    flags += ["--resume_from_checkpoint", "auto", "--vllm_engine_kwargs", '{"enforce_eager": true}']
    command = [*launcher, "--main_process_port", str(free_port()), *script, *flags]
    job = start(lambda _: command, output_dir, env={"PYTHONPATH": ""})
    try:
        assert job.wait(JOB_S) == [0], job.fail("the job failed")
    finally:
        job.end()
    assert [line["step"] for line in job.metrics()] == [1, 2]
    assert len(list((output_dir / "logs").glob("rank-*"))) == 2
    assert (output_dir / "model.safetensors").exists()
