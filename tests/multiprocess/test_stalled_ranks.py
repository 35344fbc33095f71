"""Ranks that are alive and do nothing while the others wait for them; on nodes of ranks without torch."""

import signal
import time
from collections.abc import Callable

import pytest

from tests.support.sentinels import LightNode, ends_well, everyone, light_job, nothing_happens

TIMEOUT_S = 2.0
WARN_S, STALL_S = 1.0, 4.0
QUICK = {"stall_warn_s": WARN_S, "stall_s": STALL_S, "first_stall_s": 30.0}
PATIENCE_S = 60.0


def all_enter(nodes: list[LightNode], late: int, *, phase: str = "train") -> None:
    """All ranks have had a step, and are in `phase`; all but `late` go one micro-batch further."""
    for rank in everyone(nodes):
        rank.do("step 0.1")
        rank.do(f"phase {'train' if rank.rank != late else phase} 1")
        rank.do("enter 3" if rank.rank != late else "enter 2")


def until_said(capfd: pytest.CaptureFixture, words: str) -> str:
    said, deadline = "", time.monotonic() + PATIENCE_S
    while words not in said:
        assert time.monotonic() < deadline, said
        said += capfd.readouterr().err
        time.sleep(0.05)
    return said


def holds_the_lock(rank: object) -> None:
    rank.tell("hold 600")  # type: ignore[attr-defined]


@pytest.mark.parametrize("stuck", [None, holds_the_lock], ids=["asleep", "with the interpreter's lock"])
def test_stalled_rank_is_named_with_its_stack(stuck: Callable | None, capfd: pytest.CaptureFixture) -> None:
    with light_job(TIMEOUT_S, nodes=2, **QUICK) as nodes:
        all_enter(nodes, late=2)
        if stuck is not None:
            stuck(nodes[1].ranks[0])
        said = until_said(capfd, "the sentinel of node 1 warns that rank 2 is behind the others")
        while "light_rank.py" not in said:
            said += until_said(capfd, "\n")
        assert "it has entered 2 micro-batches, steps and ends of phases and 0 collectives, others 3 and 0" in said
        assert "[GRPO-620]" in said
        others = [rank for rank in everyone(nodes) if rank.rank != 2]
        (record,) = {rank.record() for rank in others}
        assert (record.node, record.rank, record.host, record.phase) == (1, 2, "h1", "train")
        assert "rank 2 is behind the others" in record.cause
        assert "light_rank.py" in record.cause


def test_late_rank_in_save_generate_or_evaluate_is_not_stalled(capfd: pytest.CaptureFixture) -> None:
    for phase in ("save", "generate", "evaluate"):
        with light_job(TIMEOUT_S, nodes=2, **QUICK) as nodes:
            all_enter(nodes, late=2, phase=phase)
            nothing_happens(nodes, STALL_S + 3 * TIMEOUT_S)
            ends_well(nodes)
    assert "warns" not in capfd.readouterr().err


def test_generation_stall_counts_from_last_look_of_local_main(capfd: pytest.CaptureFixture) -> None:
    with light_job(TIMEOUT_S, nodes=2, **QUICK) as nodes:
        for rank in everyone(nodes):
            rank.do("step 0.1")
            rank.do(f"phase generate {1 if rank.rank == 2 else 2}")
        until = time.monotonic() + STALL_S + 2 * TIMEOUT_S
        while time.monotonic() < until:
            nodes[1].ranks[0].do("look")
            time.sleep(WARN_S / 4)
        assert "warns" not in capfd.readouterr().err
        until_said(capfd, "the sentinel of node 1 warns that rank 2 has not come to the end of the generation")
        (record,) = {rank.record() for rank in everyone(nodes) if rank.rank != 2}
        assert (record.node, record.rank, record.phase) == (1, 2, "generate")
        assert "GRPO-620" in record.cause


def test_late_rank_with_progress_is_not_stalled(capfd: pytest.CaptureFixture) -> None:
    with light_job(TIMEOUT_S, nodes=2, **QUICK) as nodes:
        all_enter(nodes, late=2)
        for _ in range(30):
            nodes[1].ranks[0].do("enter 1")
            for rank in everyone(nodes):
                if rank.rank != 2:
                    rank.do("enter 1")
            time.sleep(WARN_S / 4)
        ends_well(nodes)
    assert "warns" not in capfd.readouterr().err


def test_stall_limit_after_long_step_grows_with_it(capfd: pytest.CaptureFixture) -> None:
    """Five of them."""
    with light_job(TIMEOUT_S, nodes=2, **QUICK) as nodes:
        all_enter(nodes, late=2)
        nodes[1].ranks[0].do("step 60")
        nothing_happens(nodes, 2 * STALL_S)
        ends_well(nodes)
    assert "warns" not in capfd.readouterr().err


def test_stall_limit_before_first_step_is_first_stall_s(capfd: pytest.CaptureFixture) -> None:
    for first_s in (2 * STALL_S, 60.0):
        with light_job(TIMEOUT_S, nodes=2, **{**QUICK, "first_stall_s": first_s}) as nodes:
            for rank in everyone(nodes):
                rank.do("phase train 1")
                rank.do("enter 3" if rank.rank != 2 else "enter 2")
            until_said(capfd, "the sentinel of node 1 warns that rank 2 is behind the others")
            begun = time.monotonic()
            if first_s > 2 * STALL_S:
                nothing_happens(nodes, 2 * STALL_S)
                ends_well(nodes)
            else:
                (record,) = {rank.record() for rank in everyone(nodes) if rank.rank != 2}
                assert record.rank == 2
                assert time.monotonic() - begun > STALL_S, "the limit of later steps"


def test_stall_of_all_ranks_at_same_place_is_reported(capfd: pytest.CaptureFixture) -> None:
    with light_job(TIMEOUT_S, nodes=2, **QUICK) as nodes:
        all_enter(nodes, late=-1)
        said = until_said(capfd, "none of them goes on")
        assert "no rank is behind: all have entered 3 micro-batches" in said
        (record,) = {rank.record() for rank in everyone(nodes)}
        assert (record.node, record.rank) == (0, 0)


def test_rank_aborted_while_waiting_blames_rank_behind() -> None:
    """As by NCCL's watchdog."""
    with light_job(TIMEOUT_S, nodes=2, stall_s=600.0, first_stall_s=600.0) as nodes:
        all_enter(nodes, late=2)
        time.sleep(TIMEOUT_S)  # until all is in a beat
        nodes[0].ranks[1].send(signal.SIGABRT)
        (record,) = {rank.record() for rank in everyone(nodes) if rank.rank != 1}
        assert (record.node, record.rank) == (1, 2)
        assert "the process of rank 1" in record.cause
        assert "[GRPO-620]" in record.cause
    with light_job(TIMEOUT_S, nodes=2, stall_s=600.0, first_stall_s=600.0) as nodes:
        all_enter(nodes, late=-1)
        time.sleep(TIMEOUT_S)
        nodes[0].ranks[1].send(signal.SIGABRT)
        (record,) = {rank.record() for rank in everyone(nodes) if rank.rank != 1}
        assert record.rank == 1
        assert "[GRPO-621]" in record.cause
