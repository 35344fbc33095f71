"""Installed versions against the tested ranges, which are the package's own requirements."""

import warnings
from collections.abc import Callable
from importlib import metadata

from packaging.requirements import Requirement

from grpo.place.same_everywhere import DISTRIBUTION, installed_version


def tested_requirements() -> tuple[list[Requirement], list[Requirement]]:
    """Return the installed package's requirements: the general ones, and those of its engine (extras `gpu` and `cpu`).

    Raises importlib.metadata.PackageNotFoundError if the package itself is not installed.
    """
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    always = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    engines = [
        r
        for r in requirements
        if r not in always and r.marker is not None and any(r.marker.evaluate({"extra": e}) for e in ("gpu", "cpu"))
        if r.name != DISTRIBUTION  # the extra `report` is part of both
    ]
    return always, engines


def is_tested(requirement: Requirement, version: str) -> bool:
    return requirement.specifier.contains(version, prereleases=True)


def warn_of_untested(installed: Callable[[str], str | None] = installed_version) -> None:
    """Warn of packages installed in an untested version; missing ones fail by themselves."""
    try:
        always, engines = tested_requirements()
    except metadata.PackageNotFoundError:  # imported from a checkout that is not installed
        return
    untested = [
        f"{each.name} {version} (tested is {each.specifier})"
        for each in (*always, *engines)
        if (version := installed(each.name)) is not None and not is_tested(each, version)
    ]
    if untested:
        warnings.warn(
            f"nobody has tested {', '.join(untested)} with this package: look at the first steps, or install the "
            "versions of `grpo constraints cuda` (without GPUs: cpu)",
            stacklevel=2,
        )
