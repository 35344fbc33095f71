"""Installed packages of a node, compared with the tested versions."""

from collections.abc import Callable, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo.ops.doctor.records import Finding
from grpo.place.same_everywhere import built_for_another_torch
from grpo.preflight.versions import is_tested


def check_versions(
    always: Sequence[Requirement],
    engines: Sequence[Requirement],
    *,
    python: str,
    requires_python: str,
    installed: Callable[[str], str | None],
) -> list[Finding]:
    """Make one finding per package outside the tested set, or one for all packages together."""
    findings = []

    def fail(message: str, fix: str) -> None:
        findings.append(Finding.fail("versions", message, fix))

    if not SpecifierSet(requires_python).contains(python):
        fail(f"Python is {python}, supported is {requires_python}", "make the environment with another Python")
    present = [engine for engine in engines if installed(engine.name)]
    if not present:
        either = " or ".join(engine.name for engine in engines)
        fail(
            f"no engine: neither {either} is installed",
            "make install BACKEND=cuda, or BACKEND=cpu without GPUs; or pip install that one",
        )
    elif len(present) > 1:
        names = " and ".join(engine.name for engine in present)
        fail(f"{names} are both installed, and overwrite each other", "make a new environment with one of them")
    if unfit := built_for_another_torch(installed):
        message, _, fix = unfit.partition(": ")
        fail(f"{message}, and every import of transformers fails", fix)
    shown = [f"python {python}"]
    for requirement in (*always, *present):
        version = installed(requirement.name)
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None:
            fail(f"{requirement.name} is not installed", f"pip install '{wanted}'")
        elif not is_tested(requirement, version):
            message = f"{requirement.name} is {version}, tested is {requirement.specifier}"
            findings.append(Finding.warn("versions", message, f"pip install '{wanted}'"))
        else:
            shown.append(f"{requirement.name} {version}")
    return findings or [Finding.passed("versions", ", ".join(shown))]
