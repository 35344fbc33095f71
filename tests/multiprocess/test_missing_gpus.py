"""A torch that is built for GPUs and sees none, or no compiler beside them: nothing trains, and all say why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import BIN, ROOT, free_port

SEES_NO_GPU = "(CUDA_VISIBLE_DEVICES='') [GRPO-101]"
DEADLINE_S = 300


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import torch\ntorch.version.cuda = '12.9'\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NCCL_", "GLOO_"))}
    path = f"{tmp_path / 'site'}:{ROOT}"
    return {**clean, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "500", "HOME": str(tmp_path)}


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def test_start_without_visible_gpu_fails_and_names_cause(env: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    train = start([sys.executable, "train.py", "--output_dir", str(out)], env)
    doctor = start([sys.executable, "-m", "grpo", "doctor"], env)
    reported = start([sys.executable, "-m", "grpo", "doctor", "--", "--use_cpu"], env)
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in (train, doctor, reported)]
    assert [train.returncode, doctor.returncode, reported.returncode] == [1, 1, 0], "\n".join(outputs)
    assert SEES_NO_GPU in outputs[0]
    state = json.loads((out / "run_state.json").read_text())
    assert (state["state"], state["kind"]) == ("failed", "user"), "a scheduler does not start it again"
    assert SEES_NO_GPU in state["why"]
    assert "the model is loaded" not in outputs[0], "it ends before that"
    assert "gpus" in outputs[1]
    assert "CUDA 12.9" in outputs[1]
    assert "[GRPO-101]" in outputs[1]
    assert "--gres=gpu:8" in outputs[1]


@pytest.mark.long
def test_start_without_compiler_fails_before_model_is_loaded(env: dict[str, str], tmp_path: Path) -> None:
    """Triton would look for it in the engines' first kernel, minutes later."""
    made_up = (
        "torch.version.cuda = '12.9'\ntorch.cuda.is_available = lambda: True\ntorch.cuda.device_count = lambda: 2\n"
    )
    # It would load its library for these GPUs when it is imported.
    made_up += "sys.modules['bitsandbytes'] = None\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import sys\nimport torch\n{made_up}")
    out = tmp_path / "out"
    env |= {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}
    env.pop("CC", None)
    train = start([sys.executable, "train.py", "--output_dir", str(out)], env)
    doctor = start([sys.executable, "-m", "grpo", "doctor"], env)
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in (train, doctor)]
    assert [train.returncode, doctor.returncode] == [1, 1], "\n".join(outputs)
    for output in outputs:
        assert "[GRPO-109]" in output
        assert "apt install gcc" in output
    assert "the model is loaded" not in outputs[0], "it ends before that"


@pytest.mark.long
def test_start_with_cpu_setting_of_accelerate_accepts_missing_gpus(env: dict[str, str], tmp_path: Path) -> None:
    """Accelerate's DeepSpeed launcher does not hand `use_cpu` on. Both starts end at the next mistake."""
    wrong = ["train.py", "--output_dir", str(tmp_path / "out"), "--dataset_name", "a/b"]
    launch = [str(BIN / "accelerate"), "launch", "--num_processes", "1", "--main_process_port", str(free_port())]
    asked = start([*launch, "--config_file", "configs/cpu.yaml", *wrong], env)
    flagged = start([sys.executable, *wrong, "--use_cpu"], env)
    for process in (asked, flagged):
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1, output
        assert "a data set is given, but no model" in output
        assert "sees no GPU" not in output
