"""The names of other libraries that are built on: all of them listed, and each as it is installed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo
from grpo.place.patches import deepspeed, stdlib, torch, trl, vllm
from grpo.place.patches.patch import Patch, fits
from grpo.place.patches.trl import SAMPLE_PRINTER
from tests.support.installed import Libraries, NotThereError, source_of
from tools.private_names import DOCUMENTED, TABLE, PrivateName

PACKAGE = Path(grpo.__file__).parent
FILES = {
    path: ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if "patches" not in path.parts and "files" not in path.parts
}
IN_C = "torch.C++"
LIBRARIES = ("trl", "transformers", "vllm", "deepspeed", "peft", "accelerate")
PATCHES = [
    each
    for module in (deepspeed, stdlib, torch, trl, vllm)
    for value in vars(module).values()
    for each in (value if isinstance(value, tuple) else [value])
    if isinstance(each, Patch)
]
NOT_IN_A_FILE = {  # made when it is first asked for, of a process, or of an object in C++
    "deepspeed.ops.__compatible_ops__.deepspeed_shm_comm",
    "multiprocessing.process._current_process._config.semprefix",
    "sys.__class__",
    "torch.distributed.group.WORLD.bound_device_id",
}
TRAINERS = (
    "trl.trainer.grpo_trainer.GRPOTrainer",
    "trl.trainer.base_trainer._BaseTrainer",
    "transformers.trainer.Trainer",
)


def complaint(row: PrivateName, libraries: Libraries) -> str:
    """What is wrong with a row of the table; '' where nothing is."""
    try:
        found = libraries.find(row.owner, row.name)
    except NotThereError as error:
        return f"{row} ({row.use}): {error}"
    if row.signature and not fits(found, row.signature):
        return f"{row} ({row.use}): its signature is {found}, not {row.signature}"
    return ""


IN_FILES = [row for row in (*TABLE, *DOCUMENTED) if row.owner != IN_C]


@pytest.mark.parametrize("row", IN_FILES, ids=str)
def test_private_name_in_table_matches_installed_library(row: PrivateName) -> None:
    assert complaint(row, Libraries()) == ""


@pytest.mark.parametrize("row", [row for row in IN_FILES if row.owner.startswith("trl.")], ids=str)
def test_complaint_after_trl_rename_names_missing_symbol(row: PrivateName) -> None:
    module, _ = Libraries().module_of(row.owner)
    source = source_of(module)
    assert source is not None
    renamed = Libraries({module: re.sub(rf"\b{row.name}\b", f"{row.name}_of_old", source)})
    assert complaint(row, renamed) == f"{row} ({row.use}): {row.owner} has no {row.name}"


def test_complaint_after_trl_adds_parameter_names_signature() -> None:
    module = "trl.trainer.grpo_trainer"
    source = source_of(module).replace("def _generate(self, prompts: list", "def _generate(self, first, prompts: list")
    assert [complaint(row, Libraries({module: source})) for row in IN_FILES if row.name == "_generate"] == [
        f"{module}.GRPOTrainer._generate (overrides): its signature is (self, first, prompts), not (self, prompts)"
    ]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.symbol)
def test_patched_symbol_matches_installed_signature(patch: Patch) -> None:
    if patch.symbol in NOT_IN_A_FILE:
        return  # `Patch` looks at it when it is applied
    owner, _, name = patch.symbol.rpartition(".")
    found = Libraries().find(owner, name)
    imported = ("torch.compile", "torch.load", SAMPLE_PRINTER.symbol)  # or overloaded
    if patch.looks.startswith("(") and patch.symbol not in imported:
        assert fits(found, patch.looks)


def test_patches_have_unique_symbols() -> None:
    assert len(PATCHES) == len({patch.symbol for patch in PATCHES}) > 20


def listed() -> set[str]:
    return {row.name for row in TABLE} | {patch.symbol.rpartition(".")[2] for patch in PATCHES}


def own_names() -> set[str]:
    """All that the package defines, or gives to `self`."""
    names = set()
    for tree in FILES.values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return names


def attributes() -> Iterator[tuple[str, ast.Attribute]]:
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", node


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_private_attributes_in_package_are_own_or_listed() -> None:
    known = own_names() | listed() | {"_dynamo", "_inductor"}  # modules of torch's
    outside = {
        f"{place}: {ast.unparse(node)}"
        for place, node in attributes()
        if is_private(node.attr) and node.attr not in known
    }
    assert outside == set()


def test_imported_private_names_are_listed() -> None:
    outside = {
        f"{path}: {node.module}.{alias.name}"
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES
        for alias in node.names
        if any(is_private(part) for part in (*node.module.split("."), alias.name)) and alias.name not in listed()
    }
    assert outside == set()


def shared_with_trls() -> set[str]:
    """Names of `GRPOTrainer`'s own and of what it asks of itself; and what its parts see of it."""
    (trainer,) = (node for node in FILES[PACKAGE / "trainer.py"].body if isinstance(node, ast.ClassDef))
    used = {each.name for each in trainer.body if isinstance(each, ast.FunctionDef)}
    owners = ("self", "super()", "self.trainer", "TRLTrainer")
    for tree in (trainer, FILES[PACKAGE / "seam" / "view.py"]):
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name) if ast.unparse(node.value) in owners:
                    used.add(name)
                case ast.Call(func=ast.Name(id="trls"), args=[ast.Constant(value=name), *_]):
                    used.add(name)
    return used


def test_names_shared_with_trl_trainers_match_table() -> None:
    """Public names too, and one of ours that TRL begins to use for something else."""
    libraries, used = Libraries(), shared_with_trls()
    theirs = set().union(*(libraries.scope(owner).own for owner in TRAINERS)) - {"__init__"}
    of_trainers = {row.name for row in (*TABLE, *DOCUMENTED) if row.owner in TRAINERS}
    assert used & theirs - of_trainers == set(), "used, and not in the table"
    assert of_trainers - used == set(), "in the table, and not used"


def test_table_rows_are_all_used() -> None:
    used = {node.attr for _, node in attributes()} | own_names()
    words = {word for path in FILES if path.name != "table.py" for word in re.findall(r"\w+", path.read_text())}
    assert [str(row) for row in TABLE if row.name not in used | words] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_imports_from_libraries_exist_as_installed(library: str) -> None:
    """From modules in which it is defined: a library's own package gives its names out in ways of its own."""
    libraries, missing, seen = Libraries(), [], 0
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{library}."):
                module, inside = libraries.module_of(node.module)
                if inside:
                    missing.append(f"{path.name}: there is no module {node.module}")
                    continue
                for alias in node.names:
                    seen += 1
                    try:
                        libraries.find(module, alias.name)
                    except NotThereError as error:
                        if alias.name not in (source_of(module) or "") and libraries.module_of(
                            f"{module}.{alias.name}"
                        ) == (module, alias.name):
                            missing.append(f"{path.name}: {error}")
    assert missing == []
    assert seen
