"""Programs in the sandbox with small limits, for the machine is shared."""

import os
from dataclasses import replace
from typing import Any

import psutil

from grpo.ops.train.sandbox import Outcome, ProgramLimits, run_program

SMALL = ProgramLimits(wall_s=20, cpu_s=2, memory_bytes=2**28, processes=4, file_bytes=2**20, output_bytes=2**16)


def outcome(source: str, isolated: bool, stdin: bytes = b"", **limits: Any) -> Outcome:
    return run_program(source, stdin, replace(SMALL, **limits), isolated=isolated)


def living_since(before: set[psutil.Process]) -> list[list[str]]:
    """Command lines of the processes below this one that were not there before; they are ended."""
    living = []
    for process in set(psutil.Process().children(recursive=True)) - before:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process.cmdline())
                process.kill()
            if process.ppid() == os.getpid():
                process.wait(30)
        except psutil.NoSuchProcess:
            continue
    return living
