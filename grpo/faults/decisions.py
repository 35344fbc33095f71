"""What follows a failed attempt: one table, for launchers, schedulers and docs. Needs nothing but Python."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from grpo.faults.failure import FailureKind


class Answer(StrEnum):
    """What is done about a failure."""

    END = "end"
    """Exit code 1: another start would meet it again."""
    START_AGAIN = "start again"
    """Exit code 85, from the newest complete checkpoint. A crash: `--max-crashes` without a newer one end it."""
    REQUEUE = "requeue"
    """Exit code 85, and no crash is counted."""
    REPLACE_NODE = "replace a node"
    """As `START_AGAIN`; where the job has spare nodes, lost ones are looked for and replaced."""


_END, _START, _REQUEUE, _REPLACE = Answer.END, Answer.START_AGAIN, Answer.REQUEUE, Answer.REPLACE_NODE

ANSWERS: dict[str, tuple[Answer, Answer, Answer]] = {
    # Before the first optimizer step of the job; behind it; behind it, after a crash without a newer checkpoint.
    FailureKind.USER: (_END, _START, _END),
    FailureKind.MEMORY: (_END, _START, _END),
    FailureKind.MACHINE: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.NODE_LOST: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.ENGINE: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.STOP: (_REQUEUE, _REQUEUE, _REQUEUE),
}


def answer_to(kind: str | None, *, is_behind_first_step: bool, was_seen: bool = False) -> Answer:
    """What is done about a failure.

    Args:
        kind: a `FailureKind`; any other is taken for the machine's.
        is_behind_first_step: of the job; a run that has resumed from a checkpoint is.
        was_seen: whether an attempt before has crashed, and no newer checkpoint was completed since.
    """
    answers = ANSWERS.get(kind or "", ANSWERS[FailureKind.MACHINE])
    return answers[is_behind_first_step + (is_behind_first_step and was_seen)]


def answer_to_end(state: Mapping[str, Any] | None, *, was_seen: bool = False) -> Answer:
    """As `answer_to`, by what `run_state.json` says of an attempt that has not finished; None where it says nothing."""
    state = state or {}
    kind = FailureKind.STOP if state.get("state") == "stopped" else state.get("kind")
    return answer_to(kind, is_behind_first_step=bool(state.get("step")), was_seen=was_seen)
