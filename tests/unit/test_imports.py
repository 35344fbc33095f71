"""The package is lazy, and the engine's side stays free of the trainer's."""

import subprocess
import sys

import pytest


def loaded(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["grpo.config", "grpo.place.topology", "grpo.rollout.packing"])
def test_light_modules_load_neither_engine_nor_deepspeed(module: str) -> None:
    assert not {"vllm", "deepspeed"} & loaded(f"import {module}")


def test_what_runs_before_a_users_script_reads_no_variable_that_it_may_set() -> None:
    """HF_HOME, HF_HUB_OFFLINE and others are read once, at import."""
    modules = loaded("import grpo.ops.launch.script, grpo.ops.launch.agent, grpo.ops.telling")
    assert not {"datasets", "huggingface_hub", "transformers", "torch", "pyarrow"} & modules


def test_importing_the_package_loads_nothing() -> None:
    assert not {"torch", "trl", "vllm", "deepspeed", "transformers"} & loaded("import grpo")


def test_the_sentinel_loads_the_standard_library_alone() -> None:
    assert not {"torch", "numpy", "psutil", "pydantic", "multiprocessing"} & loaded("import grpo.faults.sentinel")


def test_the_engine_host_loads_nothing_of_the_trainer() -> None:
    modules = loaded("import grpo.engine.host, grpo.engine.client, grpo.engine.early, grpo.engine.plugin")
    assert not {"torch", "trl", "deepspeed", "vllm", "grpo.trainer"} & modules
    workers = loaded("import grpo.weights.worker")
    assert "vllm" in workers
    assert not {"trl", "deepspeed", "grpo.trainer"} & workers
