"""Programs in the sandbox with small limits, for the machine is shared."""

from dataclasses import replace
from typing import Any

from grpo.ops.train.sandbox import Limits, Outcome, run_program

SMALL = Limits(wall_s=20, cpu_s=2, memory_bytes=2**28, processes=4, file_bytes=2**20, output_bytes=2**16)


def outcome(source: str, isolated: bool, stdin: bytes = b"", **limits: Any) -> Outcome:
    return run_program(source, stdin, replace(SMALL, **limits), isolated=isolated)
