"""Adapters of known data sets: convert an original row to a prompt and columns for the rewards.

`solution` is the answer inside `\\boxed{}`: math_verify does not parse a bare `\\frac{3}{4}`, and TRL's
`accuracy_reward` would give such rows no reward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Reader of one kind of data set."""

    columns: tuple[str, ...]
    """Required columns."""
    to_prompt: Callable[[Row], dict[str, Any]]


def _gsm8k(row: Row) -> dict[str, Any]:
    """openai/gsm8k: the answer follows `####`, with commas between thousands."""
    return {"prompt": row["question"], "solution": boxed(row["answer"].rpartition("####")[2].replace(",", ""))}


def _boxed_math(row: Row) -> dict[str, Any]:
    """EleutherAI/hendrycks_math, open-r1/OpenR1-Math-220k: `answer`, if present, takes precedence over the worked
    solution."""
    answer = row.get("answer")
    return {"prompt": row["problem"], "solution": boxed(answer) if answer else boxed(last_boxed(row["solution"]))}


def _sanity_math(row: Row) -> dict[str, Any]:
    """sail/Sanity-Test-R1D-1.5B: the prompt is a list of messages that asks for `\\boxed{}` already."""
    return {"prompt": row["prompt"], "solution": boxed(row["reward_model"]["ground_truth"])}


def _dapo_math(row: Row) -> dict[str, Any]:
    """open-r1/DAPO-Math-17k-Processed: `solution` is only the answer."""
    return {"prompt": row["prompt"], "solution": boxed(row["solution"])}


def _verifiable_code(row: Row) -> dict[str, Any]:
    """open-r1/verifiable-coding-problems-python and data sets made from it; `code_reward` reads `verification_info`."""
    return {"prompt": row["problem"], "verification_info": row["verification_info"]}


ADAPTERS = {
    "gsm8k": Adapter(columns=("question", "answer"), to_prompt=_gsm8k),
    "boxed_math": Adapter(columns=("problem", "solution"), to_prompt=_boxed_math),
    "sanity_math": Adapter(columns=("prompt", "reward_model"), to_prompt=_sanity_math),
    "dapo_math": Adapter(columns=("prompt", "solution"), to_prompt=_dapo_math),
    "verifiable_code": Adapter(columns=("problem", "verification_info"), to_prompt=_verifiable_code),
}


def boxed(answer: Any) -> str:
    return rf"\boxed{{{str(answer).strip()}}}"


def last_boxed(text: str) -> str:
    """Return the contents of the last `\\boxed{}` of a worked solution.

    Raises:
        ValueError: there is none.
    """
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for end, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if mark and not depth:
            return rest[:end]
    shown = text if len(text) <= 80 else f"…{text[-79:]}"
    raise ValueError(rf"a solution of the data set has no answer in \boxed{{}}: {shown!r}; leave such rows out")
