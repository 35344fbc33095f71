"""Each family's names, looked up in vLLM's class: minutes, for vLLM looks at each class in a process of its own."""

import subprocess
import sys

import pytest

from tests.families.page import ROOT


@pytest.mark.long
def test_families_page_matches_vllm() -> None:
    command = [sys.executable, "-m", "tests.families.page", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
