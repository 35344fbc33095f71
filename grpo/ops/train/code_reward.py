"""Reward for programs: the code block of a completion runs on the row's test cases, in a sandbox."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo.ops.train.completion import text_of
from grpo.ops.train.sandbox import ProgramLimits, must_isolate, run_program
from grpo.place.launch import read_launch

PROGRAM_S = 60.0  # all test cases of a completion; a rank's completions have `reward_timeout` together
MOST_AT_ONCE = 16
_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)


def code_reward(
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    verification_info: Sequence[Mapping[str, Any] | str],
    **_: Any,
) -> list[float | None]:
    """Return 1.0 if the last ```python block passes every test case of its row, else 0.0; several run in parallel.

    None, no reward, for a row without test cases or with other ones than text in and text out, and if the sandbox
    itself failed.

    Args:
        verification_info: `{"language": "python", "test_cases": [{"type", "input", "output", "fn_name"}, …]}`, or that
            as JSON.

    Raises:
        ValueError: this machine has no sandbox and GRPO_CODE_REWARD_UNISOLATED is not 1.
    """
    texts = [*map(text_of, completions)]
    rows = [json.loads(each) if isinstance(each, str) else each for each in verification_info]
    isolated = must_isolate()
    with ThreadPoolExecutor(_places()) as pool:
        futures = [pool.submit(_score, text, row, isolated=isolated) for text, row in zip(texts, rows, strict=True)]
        return [future.result() for future in futures]


def _score(text: str, row: Mapping[str, Any], *, isolated: bool) -> float | None:
    cases = row["test_cases"]
    if row.get("language", "python") != "python" or not cases:
        return None
    if not all(_is_of_texts(case) for case in cases):
        return None
    blocks = _BLOCK.findall(text)
    if not blocks:
        return 0.0
    until = time.monotonic() + PROGRAM_S
    for case in cases:
        wall_s = min(ProgramLimits().wall_s, until - time.monotonic())
        if wall_s <= 0:
            return 0.0
        ended = run_program(blocks[-1], case["input"].encode(), ProgramLimits(wall_s=wall_s), isolated=isolated)
        if ended.why not in ("", "late", "output", "memory"):
            return None
        if ended.code != 0 or lines_of(ended.output.decode(errors="replace")) != lines_of(case["output"]):
            return 0.0
    return 1.0


def _is_of_texts(case: Mapping[str, Any]) -> bool:
    """True for text in and text out: not a function call, whose arguments are lists."""
    if case.get("fn_name") or case.get("type") not in (None, "stdin_stdout"):
        return False
    return isinstance(case.get("input"), str) and isinstance(case.get("output"), str)


def lines_of(text: str) -> list[str]:
    """Split into lines for comparison: without trailing white space of lines and text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _places() -> int:
    """This rank's share of the node's cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_AT_ONCE, cores // read_launch(os.environ).local_world_size))
