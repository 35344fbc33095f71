"""Weight syncs of a whole job: a weight sync group that does not open, and ranks that decide together about a gap."""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo.engine.like import EngineLike
from grpo.faults.failure import FailureRecord, JobFailed
from grpo.faults.watch import FailureWatch
from grpo.place.wire import from_json, to_json
from grpo.weights.delivery import WeightDelivery
from grpo.weights.report import LogprobGap, WeightSyncReport
from grpo.weights.verifier import Verifier
from grpo.weights.wire_format import WireFormat
from tests.support.engines import ScriptedEngine, agree
from tests.support.made_up_jobs import job
from tests.support.scripted_trainer import make_trainer, use_scripted_engines


def test_weight_sync_group_with_absent_engine_ends_job(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def absent(method: str, arguments: dict[str, Any]) -> Any:
        if method == "init_weight_transfer_engine":
            end.wait(3)
        return agree(method, arguments)

    script = use_scripted_engines(monkeypatch, control=absent)
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, vllm_sync_timeout=1.0)
    try:
        with pytest.raises(JobFailed, match=r"phase 'weight sync group': .* 1 s \(vllm_sync_timeout\) \[GRPO-502\]"):
            trainer.train()
    finally:
        end.set()
        trainer.close()


class Rendezvous:
    """The exchange of two ranks, each a node of its own, in threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.said: list[tuple[FailureRecord | None, str]] = [(None, "")] * 2

    def groups_of(self, rank: int) -> Any:
        def exchange(watch: Any, failure: FailureRecord | None, value: Any, kind: Any) -> list[Any]:
            self.said[rank] = failure, to_json(value, kind)
            self.barrier.wait()
            said = [*self.said]
            self.barrier.wait()
            if (failed := next((failure for failure, _ in said if failure is not None), None)) is not None:
                raise JobFailed(failed)
            return [from_json(text, kind) for _, text in said]

        return SimpleNamespace(exchange=exchange, topology=job((8, 8), ranks=1)[rank])


class GapsGiven(Verifier):
    """Verifications find these gaps, one after the other."""

    __slots__ = ("gaps",)

    def verify(self, sync_number: int, *, engines_work: bool) -> tuple[LogprobGap, EngineLike] | None:
        gap = self.gaps.pop(0)
        return LogprobGap(mean=gap, max=gap, judged=gap), ScriptedEngine(f"engine 0 of node {self.timeout_s:.0f}")


def delivery_of(
    rank: int, rendezvous: Rendezvous, gaps: list[float], sent: list[str], written: list[list[str]]
) -> WeightDelivery:
    report = WeightSyncReport(total_s=1.0, gather_s=1.0, send_s=1.0, num_bytes=1)
    syncer = SimpleNamespace(
        source=SimpleNamespace(
            forget_sent=lambda: sent.append("all"),
            written=lambda *, by_sums: written.pop(0) if written else [],
            send_again=lambda names: sent.append(" and ".join(names)),
        ),
        sync=lambda step, *, checks_bits: sent.append("sync" if checks_bits else "unchecked") or (report, None),
        packs_on_gpu=False,
        connect=lambda: None,
        at_rest=contextlib.nullcontext,
    )
    verifier = GapsGiven(
        model=None,
        clients=[],
        probe=[],
        dtype=torch.bfloat16,
        asked_limit=None,
        autocast=contextlib.nullcontext,
        cast_lm_head_to_fp32=False,
        timeout_s=rank,
        largest=lambda mine: mine,
    )
    verifier.gaps = [*gaps]
    return WeightDelivery(
        SimpleNamespace(has_lost=lambda within_s=0.0: False, clients=[]),
        syncer,
        verifier,
        rendezvous.groups_of(rank),
        FailureWatch(None, node=rank, rank=rank, host=f"host{rank}"),
        wire_format=WireFormat(),
        timeout_s=10.0,
        on_restart=lambda restart: None,
        trial=None,
    )


def delivered(
    of_node_0: list[float], of_node_1: list[float], written: Sequence[list[list[str]]] = ([], [])
) -> tuple[list[list[str]], list[str]]:
    """Weight syncs as long as there are gaps; what each rank has sent, and how each has ended.

    Args:
        written: what each rank sees of writes to frozen parameters, before each weight sync.
    """
    rendezvous, sent = Rendezvous(), [[], []]
    gaps = [of_node_0, of_node_1]
    deliveries = [delivery_of(rank, rendezvous, gaps[rank], sent[rank], [*written[rank]]) for rank in range(2)]

    def deliver(delivery: WeightDelivery) -> str:
        try:
            while delivery.verifier.gaps:
                delivery.deliver(1)
        except JobFailed as error:
            return f"{type(error).__name__}: {error.record}"
        return f"within {delivery.verifier.limit:g}" if delivery.verification.is_within else "beyond"

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(deliver, deliveries))
    return sent, ends


def test_verification_gap_on_one_node_resends_all_weights_on_all() -> None:
    sent, ends = delivered([0.01, 0.01, 0.01, 0.02], [0.01, 0.3, 0.01, 0.01])
    assert sent == [["all", "sync", "sync", "all", "sync", "sync"]] * 2
    assert ends == ["within 0.05"] * 2


def test_repeated_gap_on_one_node_ends_job_on_all_and_names_node() -> None:
    sent, ends = delivered([0.01, 0.01, 0.01], [0.01, 0.3, 0.2])
    assert sent == [["all", "sync", "sync", "all", "sync"]] * 2
    assert ends[0] == ends[1]
    assert ends[0].startswith("StepFailed: node 1 (host1), rank 1")
    assert "engine 0 of node 1 does not compute what the trainer does" in ends[0]


def test_repeated_gap_within_hard_limit_continues_on_all_nodes() -> None:
    _, ends = delivered([0.01, 0.01, 0.01], [0.01, 0.1, 0.1])
    assert ends == ["beyond"] * 2


def test_first_verification_failing_on_one_node_ends_job_on_all() -> None:
    sent, ends = delivered([0.01], [0.2])
    assert sent == [["all", "sync"]] * 2
    assert ends[0] == ends[1]
    assert ends[0].startswith("JobFailed: node 1 (host1), rank 1")


def test_frozen_writes_on_one_rank_are_resent_from_all_ranks() -> None:
    sent, _ = delivered([0.01] * 3, [0.01] * 3, written=([[], ["norm"], []], [[], ["embedding", "norm"], []]))
    assert sent == [["all", "sync", "embedding and norm", "sync", "sync"]] * 2
