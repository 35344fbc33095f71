"""The package is lazy, and the engine's side stays free of the trainer's."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import grpo
from grpo import cli

PACKAGE = Path(grpo.__file__).parent


def loaded(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["grpo.config", "grpo.place.topology", "grpo.rollout.packing"])
def test_light_modules_load_neither_engine_nor_deepspeed(module: str) -> None:
    assert not {"vllm", "deepspeed", "grpo.engine"} & loaded(f"import {module}")


def test_launcher_modules_load_neither_torch_nor_transformers() -> None:
    """HF_HOME, HF_HUB_OFFLINE and others are read once, at import."""
    modules = loaded("import grpo.ops.launch.script, grpo.ops.launch.agent, grpo.ops.mistakes")
    assert not {"datasets", "huggingface_hub", "transformers", "torch", "pyarrow"} & modules


def test_package_import_loads_no_library() -> None:
    assert not {"torch", "trl", "vllm", "deepspeed", "transformers"} & loaded("import grpo")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_loads_no_library(command: str) -> None:
    """It is there at once: what takes seconds to import comes behind the command line."""
    quietly = "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):"
    modules = loaded(f"import contextlib, io\nfrom grpo import cli\n{quietly}\n    cli.main(['{command}', '--help'])")
    assert not {"torch", "transformers", "trl", "datasets", "accelerate", "deepspeed", "altair"} & modules


def test_sentinel_import_loads_only_standard_library() -> None:
    assert not {"torch", "numpy", "psutil", "pydantic", "multiprocessing"} & loaded("import grpo.faults.sentinel")


def test_engine_host_import_loads_no_trainer_module() -> None:
    modules = loaded("import grpo.engine.host, grpo.engine.client, grpo.engine.early, grpo.engine.plugin")
    assert not {"torch", "trl", "deepspeed", "vllm", "grpo.trainer"} & modules
    workers = loaded("import grpo.weights.worker")
    assert "vllm" in workers
    assert not {"trl", "deepspeed", "grpo.trainer"} & workers


MODULE = re.compile(r"(?<!-m )\bgrpo(?:\.[a-z_]+)+")  # not in a command that a person is to type


def may_name(own: str, other: str, container: str, layers: list[str]) -> bool:
    """Whether a layers contract lets a module import another one; one that the contract does not list may."""
    floors = {name: floor for floor, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    here, there = (f"{each}.".removeprefix(f"{container}.").split(".")[0] for each in (own, other))
    return here == there or not {here, there} <= floors.keys() or floors[here] < floors[there]


def names_above(module: str, source: str) -> list[str]:
    """Modules that texts of a module name, docstrings aside, and that it may not import."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    contracts = [each for each in settings["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    nodes = [*ast.walk(ast.parse(source))]
    docs = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docs]
    return [
        name
        for text in texts
        if isinstance(text, str)
        for name in MODULE.findall(text)
        if not all(may_name(module, name, each["containers"][0], each["layers"]) for each in contracts)
    ]


def test_texts_in_package_name_no_forbidden_module() -> None:
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
        if "files" not in path.parts  # scripts that `grpo init` copies
    }
    climbs = {module: found for module, source in modules.items() if (found := names_above(module, source))}
    assert climbs == {}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("grpo.engine.host", '"""Of grpo.weights.worker."""\nX = "grpo.weights.worker.Asked"', ["grpo.weights.worker"]),
        ("grpo.engine.host", 'X = f"{1} grpo.trainer"', ["grpo.trainer"]),
        ("grpo.engine.host", 'X = "see python -m grpo.ops.doctor"', []),
        ("grpo.engine.host", 'X = ["grpo.engine.plugin", "grpo.place.log"]', []),
        ("grpo.rollout.pool", 'X = "grpo.weights.sync"', ["grpo.weights.sync"]),
        ("grpo.ops.plan.job", 'X = ["grpo.ops.doctor.table", "grpo.ops.train.data"]', ["grpo.ops.doctor.table"]),
    ],
)
def test_names_above_finds_forbidden_modules_in_texts(module: str, source: str, found: list[str]) -> None:
    assert names_above(module, source) == found
