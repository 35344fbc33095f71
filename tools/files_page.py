"""The map of files, from their docstrings' first sentences: `python -m tools.files_page` writes docs/files.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.markdown import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
LOOP = ("trainer.py", "local_vllm.py", "serving.py")
PACKAGES = ("seam", "rollout", "weights", "rewards", "checkpoints", "engine", "preflight", "config", "record", "groups",
            "faults", "model", "place", "ops")  # fmt: skip
"""From the loop down, as docs/architecture.md has them."""
BESIDE = ("tools", "bench")

HEAD = """# Every file

Written from the first sentence of each file's docstring (`python -m tools.files_page`). The packages and their order:
[How it is built](architecture.md).
"""
AROUND = {
    "`configs/`, `examples/`": "launcher files and recipes; scripts with a reward, images, tools, a loop",
    "`launch/`": (
        "sbatch templates (`slurm_job.sh` is their common part), two nodes on one machine, Kubernetes; all start "
        "`grpo launch`"
    ),
    "`tests/unit`, `multiprocess`, `engine`": "by package: no processes; real ranks and engines; one real engine",
    "`tests/support/`": "shared by several tests: stand-ins, made-up runs, jobs that are started",
    "`tests/faults`, `docs/faults.md`": "every fault in every phase on real jobs (`make faults`), and the result",
    "`tests/gpu`, `docs/gpu.md`": "tests that need GPUs, by how many (`make test-gpu`); the lines that only they run",
    "`constraints/`": "every version that is installed, on CPUs and for CUDA",
    "`pyproject.toml`, `setup.py`": "ranges, metadata, settings of tools; the README as PyPI shows it",
    "`docker/`, `.github/`, `.ci/`": "images for GPUs and CPUs, continuous integration",
    "`mkdocs.yml`": "`make docs`: the site of these pages",
    "`grpo/ops/files/`": "what `grpo init` writes and `grpo launch` falls back on; links to `configs/` and `launch/`",
}


def first_sentence(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    text = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`\"])", text)[0].rstrip(".")


def rows(folder: Path) -> list[list[str]]:
    files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("__"))
    return [[f"`{file.name}`", first_sentence(file)] for file in files]


def of_package(folder: Path, depth: int) -> Iterator[str]:
    """A package's table, and those of the packages in it."""
    name = folder.relative_to(ROOT)
    parts = [f"{'#' * depth} `{name}/`"]
    if (folder / "__init__.py").exists():
        parts.append(f"{first_sentence(folder / '__init__.py')}.")
    if found := rows(folder):
        parts.append(table(["file", "content"], found))
    yield "\n\n".join(parts)
    for inner in sorted({path.parent for path in folder.glob("*/*.py")}):
        yield from of_package(inner, depth + 1)


def page() -> str:
    package = ROOT / "grpo"
    root = {file.name: first_sentence(file) for file in sorted(package.glob("*.py")) if file.name != "__init__.py"}
    names = sorted(root, key=lambda name: (name not in LOOP, LOOP.index(name) if name in LOOP else 0, name))
    parts = [
        HEAD.rstrip(),
        f"## `grpo/`\n\n{table(['file', 'content'], [[f'`{name}`', root[name]] for name in names])}",
    ]
    for name in PACKAGES:
        parts += of_package(package / name, 2)
    for name in BESIDE:
        parts += of_package(ROOT / name, 2)
    around = table(["folder", "content"], [[name, meaning] for name, meaning in AROUND.items()])
    return "\n\n".join([*parts, f"## Around it\n\n{around}"]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
