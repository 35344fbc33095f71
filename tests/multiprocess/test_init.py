"""A wheel, with no checkout on the path: `grpo init`'s script, which needs no tools, and the commands around it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.launching import ROOT, free_port, metrics_in, start
from tests.support.made_up_data import RECIPES, save_small_model, write_rows
from tests.support.tiny_models import save_tiny_model
from tools.constraints import ABSENT
from tools.install import FROM_PYTORCH, find_uv, make_environment, uv

BUILD_S, JOB_S = 300, 360
SOURCES = ("grpo", "configs", "constraints", "docs", "launch", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, deadline_s: float = BUILD_S) -> str:
    """What it printed, with no checkout on the path."""
    env = {**os.environ, "PYTHONPATH": "", "COLUMNS": "200"}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=deadline_s
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From an sdist, as `make dist` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a build leaves files behind
    sources.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, sources)
    build = Path(sys.executable).with_name("pyproject-build")
    run(build, "--no-isolation", "--outdir", folder, sources, cwd=folder)
    shutil.rmtree(sources)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which the wheel is installed, beside what this one has but for its own `grpo`."""
    folder = tmp_path_factory.mktemp("installed")
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", venv / "bin" / "python"]
    run(*pip, "install", "--no-deps", wheel, cwd=folder)
    (own,) = venv.glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and the .pth files in it, an editable install's too, are not read.
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def test_init_folder_from_wheel_trains_without_ops_package(installed: Path, tmp_path: Path) -> None:
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


def test_wheel_and_sdist_pass_twine_check(wheel: Path, tmp_path: Path) -> None:
    twine = Path(sys.executable).with_name("twine")
    (sdist,) = wheel.parent.glob("*.tar.gz")
    assert run(twine, "check", "--strict", wheel, sdist, cwd=tmp_path).count("PASSED") == 2


@pytest.mark.long
def test_wheel_in_empty_environment_runs_readme_commands(wheel: Path, tmp_path: Path) -> None:
    program = find_uv(sys.executable)
    if program is None:
        pytest.skip("uv cannot be had: pip does not find it, and none is on the PATH")
    venv, mine = tmp_path / "venv", tmp_path / "mine"
    python = make_environment(venv, "cpu")
    installer = uv(python, program, "install")
    installer.run_first(["--no-deps", str(wheel)])
    listed = tmp_path / "cpu.txt"
    listed.write_text(run(venv / "bin" / "grpo", "constraints", "cpu", cwd=tmp_path))
    extra = [f"{wheel}[cpu]", "--constraint", str(listed), "--excludes", str(ROOT / ABSENT["cpu"])]
    installer.run_first(extra, [*extra, *FROM_PYTORCH])
    assert run(python, "-c", "import grpo; print(grpo.__file__)", cwd=tmp_path).startswith(str(venv))

    run(venv / "bin" / "grpo", "init", mine, cwd=tmp_path)
    small = ["--bf16", "false", "--max_completion_length", "8", "--report_to", "none"]
    small += ["--vllm_engine_kwargs", '{"enforce_eager": true}']
    port = str(free_port())
    of_launch = ["--config_file", "configs/cpu.yaml", "--main_process_port", port, "--output-dir", "runs/first"]
    model = save_tiny_model("qwen3-tied", tmp_path / "model", chat=True)
    script = ["train.py", "--model", model, "--max_steps", "2", "--gradient_accumulation_steps", "1", *small]
    run(venv / "bin" / "grpo", "launch", *of_launch, *script, cwd=mine, deadline_s=JOB_S)
    assert [line["step"] for line in metrics_in(mine / "runs" / "first")] == [1, 2]
    run(venv / "bin" / "grpo", "report", "runs/first", cwd=mine)
    assert (mine / "runs" / "first" / "report.html").exists()
    demo = ["--output-dir", "runs/demo", "--", "--max_steps", "2", "--logging_steps", "1"]
    said = run(venv / "bin" / "grpo", "launch", *demo, cwd=mine, deadline_s=JOB_S)
    assert 0.3 < metrics_in(mine / "runs" / "demo")[0]["reward"] < 0.55, said
    assert "demo: reward" in said

    data = write_rows(tmp_path / "rows.jsonl", RECIPES["gsm8k_qwen2.5_0.5b"][1])
    task = ["--config", mine / "recipe.yaml", "--model_name_or_path", save_small_model(tmp_path / "small")]
    task += ["--dataset_name", data, "--dataset_config", "", "--output_dir", "runs/module", "--max_steps", "1"]
    task += ["--per_device_train_batch_size", "8", "--completions_per_step", "16", "--attn_implementation", "sdpa"]
    recipe = (ROOT / "configs" / "train" / "gsm8k_qwen2.5_0.5b.yaml").read_text()
    of_gpus = re.findall(r"^vllm_reserved_gpus:.*\n", recipe, re.MULTILINE)
    (mine / "recipe.yaml").write_text(recipe.replace(*of_gpus, ""))
    accelerate = [venv / "bin" / "accelerate", "launch", "--config_file", "configs/cpu.yaml"]
    accelerate += ["--main_process_port", str(free_port()), "-m", "grpo.train"]
    run(*accelerate, *task, *small, "--eval_strategy", "no", cwd=mine, deadline_s=JOB_S)
    assert [line["step"] for line in metrics_in(mine / "runs" / "module")] == [1]
