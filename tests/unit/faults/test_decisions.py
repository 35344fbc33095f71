"""The table of what follows a failure: whole, and as the docs show it."""

import itertools
import re
from pathlib import Path

import pytest

from grpo.faults.failure import ANSWERS, Decision, FailureKind, answer_to, answer_to_end
from tests.support.launching import ROOT


def test_answers_cover_every_failure_kind() -> None:
    assert list(ANSWERS) == list(FailureKind)


@pytest.mark.parametrize(("kind", "was_seen"), [*itertools.product(FailureKind, (False, True))])
def test_answer_to_before_first_step_ignores_was_seen(kind: FailureKind, was_seen: bool) -> None:
    assert answer_to(kind, is_behind_first_step=False, was_seen=was_seen) == ANSWERS[kind][0]


@pytest.mark.parametrize(
    ("state", "was_seen", "answer"),
    [
        (None, True, Decision.REPLACE_NODE),
        ({"state": "running"}, False, Decision.REPLACE_NODE),
        ({"state": "failed", "kind": "a later version's"}, False, Decision.REPLACE_NODE),
        ({"state": "stopped", "step": 3, "kind": None}, False, Decision.REQUEUE),
        ({"state": "failed", "kind": "user", "step": 0}, False, Decision.END),
        ({"state": "failed", "kind": "user", "step": 3}, False, Decision.START_AGAIN),
        ({"state": "failed", "kind": "memory", "step": 3}, True, Decision.END),
        ({"state": "failed", "kind": "engine", "step": 3}, True, Decision.REPLACE_NODE),
    ],
)
def test_answer_to_end_of_attempt_matches_table(
    state: dict[str, object] | None, was_seen: bool, answer: Decision
) -> None:
    assert answer_to_end(state, was_seen=was_seen) is answer


def test_resume_page_matches_answers_table() -> None:
    page = Path(ROOT / "docs" / "resume.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert {kind: tuple(answers) for kind, *answers in rows} == {
        kind.value: tuple(answer.value for answer in answers) for kind, answers in ANSWERS.items()
    }
