"""What a launcher makes of its attempt's end, where rank 0 cannot have said it."""

import time
from pathlib import Path

import pytest

from grpo.launch.agent import Ending
from grpo.launch.attempt import Attempt
from grpo.launch.next_attempt import FAILED, START_AGAIN
from grpo.run.folder import RunFolder, note_failure, note_run

FAILURE = Ending(has_succeeded=False, rank=1)
SOON_S = 30.0  # half of what a launcher waits for a file system


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Of node 1, whose ranks have told it where the run is."""
    (tmp_path / "notes").mkdir()
    made = Attempt(output_dir=None, notes=tmp_path / "notes", started=5.0, is_head=False, env={})
    note_run(tmp_path / "run", made.variables())
    return made


@pytest.mark.parametrize(("can_heal", "code"), [(True, START_AGAIN), (False, FAILED)])
def test_a_node_whose_ranks_know_the_cause_does_not_wait_for_rank_0(
    attempt: Attempt, can_heal: bool, code: int
) -> None:
    note_failure(attempt.variables(), "node 0 is gone", can_heal=can_heal)
    note_failure(attempt.variables(), "a connection has ended", can_heal=True)  # what follows from the first
    begun = time.monotonic()
    got, why = attempt.conclude(FAILURE, max_crashes=3)
    assert time.monotonic() - begun < SOON_S
    assert (got, "node 0 is gone" in why) == (code, True), why


def test_what_rank_0_has_written_counts_more(attempt: Attempt, tmp_path: Path) -> None:
    note_failure(attempt.variables(), "a peer has left", can_heal=True)
    run = RunFolder(tmp_path / "run", {"GRPO_JOB": "7", "GRPO_STARTED": "5.0"})
    run.update(state="failed", why="a misspelt option", can_heal=False)
    run.release()
    code, why = attempt.conclude(FAILURE, max_crashes=3)
    assert (code, "misspelt" in why) == (FAILED, True), why
