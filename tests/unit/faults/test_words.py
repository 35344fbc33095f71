"""What follows a failure does not hang on our words: a copy of the package that says all otherwise does the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT
from tests.support.reworded import reword, reworded_package

END, AGAIN = 1, 85
FAILS_AT_ONCE: dict[str, Any] = {"before": [END], "behind": [AGAIN, END, END], "lost": [], "asks for lost nodes": False}
GOES_ON: dict[str, Any] = {"before": [AGAIN], "behind": [AGAIN, AGAIN, END], "lost": [], "asks for lost nodes": True}
NOT_REPORTED: dict[str, Any] = {"reported": False, "recorded": False}
OF_ANOTHER_RANK: dict[str, Any] = {"reported": True, "recorded": False}  # in a line
EXPECTED: dict[str, dict[str, Any]] = {
    "a placement": {**FAILS_AT_ONCE, "reported": True, "recorded": True, "symptoms": []},
    "a setting that the engine refuses": {
        **FAILS_AT_ONCE,
        "reported": True,
        "recorded": True,
        "symptoms": ["GRPO-404"],
    },
    "vLLM's memory": {**FAILS_AT_ONCE, "reported": True, "recorded": True, "symptoms": ["GRPO-404", "GRPO-631"]},
    "CUDA's memory": {**FAILS_AT_ONCE, "reported": True, "recorded": True, "symptoms": ["GRPO-631"]},
    "CUDA": {**GOES_ON, **NOT_REPORTED, "symptoms": []},
    "a sentinel": {**GOES_ON, **NOT_REPORTED, "symptoms": ["GRPO-606"]},
    "a killed engine": {**GOES_ON, **NOT_REPORTED, "symptoms": ["GRPO-406"]},
    "a late engine": {**GOES_ON, **NOT_REPORTED, "symptoms": ["GRPO-401"]},
    "a silent node": {**GOES_ON, **OF_ANOTHER_RANK, "lost": ["b"], "symptoms": ["GRPO-604"]},
    "a cut link": {**GOES_ON, **OF_ANOTHER_RANK, "symptoms": ["GRPO-614"]},
    "a node 0 that is cut off": {**GOES_ON, **NOT_REPORTED, "symptoms": ["GRPO-616"]},
    "a node that is gone": {**GOES_ON, **OF_ANOTHER_RANK, "symptoms": ["GRPO-605"]},
    "a generation after a stop": {
        **NOT_REPORTED,
        "before": [AGAIN],
        "behind": [AGAIN, AGAIN, AGAIN],
        "lost": [],
        "asks for lost nodes": False,
        "symptoms": ["GRPO-612"],
    },
}


def what_follows(package: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """By each failure of `tests.jobs.failing_ways`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "jobs" / "failing_ways.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_failure_handling_with_reworded_messages_is_unchanged(tmp_path: Path) -> None:
    package = tmp_path / "reworded"
    assert reworded_package(package) > 1000, "of all sentences"
    ours, reworded = what_follows(ROOT, tmp_path / "ours"), what_follows(package, tmp_path / "others")
    texts = {name: (found.pop("text"), reworded[name].pop("text")) for name, found in ours.items()}
    assert ours == EXPECTED
    assert reworded == EXPECTED
    assert [name for name, (one, other) in texts.items() if one == other] == ["CUDA"], "words of other libraries alone"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("is not ready after %.0f s [GRPO-401]", "jt opu sfbez bgufs %.0f s [GRPO-401]"),
        ("grpo.place.files of node-1", "grpo.place.files pg node-1"),
    ],
)
def test_reword_keeps_names_ids_and_formats(text: str, expected: str) -> None:
    assert reword(text, 1) == expected
