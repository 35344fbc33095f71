"""What is installed on a node: versions against the tested set, and which code of ours it is."""

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo.doctor.records import Finding, Status

_GIT_TIMEOUT_S = 10.0


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def tested_requirements() -> tuple[list[Requirement], list[Requirement]]:
    """What the installed package asks for: always, and as its engine (the extras `gpu` and `cpu`: one of the two).

    Raises importlib.metadata.PackageNotFoundError when the package itself is not installed.
    """
    requirements = [Requirement(text) for text in metadata.requires("grpo") or []]
    always = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    engines = [
        r
        for r in requirements
        if r not in always and r.marker is not None and any(r.marker.evaluate({"extra": e}) for e in ("gpu", "cpu"))
    ]
    return always, engines


def check_versions(
    always: Sequence[Requirement],
    engines: Sequence[Requirement],
    *,
    python: str,
    requires_python: str,
    installed: Callable[[str], str | None],
) -> list[Finding]:
    """One finding per package outside the tested set, or one for all of them together."""
    findings = []

    def fail(message: str, fix: str) -> None:
        findings.append(Finding(check="versions", status=Status.FAIL, message=message, fix=fix))

    if not SpecifierSet(requires_python).contains(python):
        fail(f"Python is {python}, supported is {requires_python}", "make the environment with another Python")
    present = [engine for engine in engines if installed(engine.name)]
    if not present:
        either = " or ".join(engine.name for engine in engines)
        fail(f"no engine: neither {either} is installed", "pip install '.[gpu]', or '.[cpu]' without GPUs")
    elif len(present) > 1:
        names = " and ".join(engine.name for engine in present)
        fail(f"{names} are both installed, and overwrite each other", "make a new environment with one of them")
    shown = [f"python {python}"]
    for requirement in (*always, *present):
        version = installed(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None:
            fail(f"{requirement.name} is not installed", f"pip install '{wanted}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            message = f"{requirement.name} is {version}, tested is {requirement.specifier}"
            fail(message, f"pip install '{wanted}'")
        else:
            shown.append(f"{requirement.name} {version}")
    return findings or [Finding(check="versions", status=Status.PASS, message=", ".join(shown))]


def versions_to_compare(requirements: Sequence[Requirement]) -> dict[str, str]:
    """Installed versions by name of what must agree between nodes; a package that is missing is left out."""
    names = ["grpo", *(requirement.name for requirement in requirements)]
    # NCCL comes as a package of its own, whose name holds the CUDA version.
    names += [d.name for d in metadata.distributions() if d.name and d.name.startswith("nvidia-nccl")]
    return {name: version for name in names if (version := installed_version(name))}


def commit_of(folder: Path) -> str:
    """The commit of the checkout that holds `folder`; empty where there is none, or no git."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def code_digest(folder: Path) -> str:
    """Over names and contents of the Python files below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
