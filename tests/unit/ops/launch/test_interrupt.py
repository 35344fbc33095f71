"""Ctrl-C while the launcher imports: libraries catch everything there."""

import subprocess
import sys
import time
from pathlib import Path

from grpo.ops.launch.next_attempt import INTERRUPTED
from tests.support.launching import free_port

END_S = 120.0
SWALLOWED = """
import os, signal, sys
from grpo.ops.launch import agreement
from grpo.cli import main

def report(*_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except:
        pass
    return agreement.NodeReport(gpus=0)

agreement.report = report
sys.exit(main(sys.argv[1:]))
"""


def test_launch_with_swallowed_interrupt_returns_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    line = ["launch", "--nodes", "127.0.0.1,127.0.0.2", "--node-rank", "0", "--port", str(free_port())]
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", SWALLOWED, *line, "--join-timeout", "600", str(script)],
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (INTERRUPTED, "grpo launch: interrupted"), ended.stderr
    assert time.monotonic() - began < END_S
