"""The bandwidth stage without a job: a wrong start, NCCL's log, and results with something missing."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo.doctor import bandwidth, table
from grpo.doctor.agreement import compare, list_nodes
from grpo.doctor.bandwidth import NcclLog
from grpo.doctor.bandwidth_verdict import RankResult, judge_bandwidth
from grpo.doctor.records import Finding, Status, Verdict
from grpo.job.launch import Launch
from tests.unit.doctor.test_node import report


def test_a_lone_rank_has_nobody_to_exchange_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert bandwidth.main([]) == 2
    assert "one rank has nobody to exchange with" in capsys.readouterr().err


def test_a_jobs_flags_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bandwidth.parse_arguments(["--config", "no.yaml"])
    assert caught.value.code == 2
    assert "no.yaml" in capsys.readouterr().err


def test_nccl_writes_its_log_where_it_is_read_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    log = NcclLog.start()
    assert log is not None
    assert (log.read().interface, log.warnings()) == ("", [])
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(
        "n1:1:1 [0] NCCL INFO Bootstrap: Using eth7:10.0.0.1<0>\nn1:1:1 [0] net.cc:5 NCCL WARN Error: no link\n"
    )
    assert (log.read().interface, log.warnings()) == ("eth7", ["Error: no link"])
    log.remove()
    assert not log.folder.exists()
    assert NcclLog.start() is None, "the user directs it already"


def test_a_partner_that_never_came_has_no_route() -> None:
    launch = Launch(rank=0, local_rank=0, world_size=2, local_world_size=1, node=0, num_nodes=2)
    assert bandwidth._route_to_another_node(launch, dist.HashStore()) == ""


def test_one_node_has_nothing_across_and_no_pairs() -> None:
    results = [RankResult(node=0, host="n", inside_s={"all-reduce": 0.1}, across_s={}, pairs_s=()) for _ in range(2)]
    verdict = judge_bandwidth(results, backend="gloo", num_bytes=10**9, pair_bytes=10**9, model_bytes=None)
    checks = {finding.check for finding in verdict.findings}
    assert "inside a node" in checks
    assert checks.isdisjoint({"across nodes", "pairs of nodes", "one push"})


def test_many_nodes_are_not_all_listed() -> None:
    assert list_nodes(["a", "b"]) == "a, b"
    many = [f"n{number}" for number in range(64)]
    told = list_nodes(many)
    assert told.startswith("n0, n1, ")
    assert told.endswith(" more")
    assert len(told) < 100


def test_how_much_a_node_logs_is_its_own_matter() -> None:
    told = compare([report("a", variables={"NCCL_DEBUG": "INFO"}), report("b")])
    assert [finding for finding in told if finding.status is not Status.PASS] == []


@pytest.mark.parametrize(("status", "is_told"), [(Status.PASS, True), (Status.FAIL, False)])
def test_the_next_step_is_told_below_a_verdict_that_is_no_fail(
    status: Status, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict(nodes=("a",), findings=(Finding(check="disk", status=status, message="5 GiB"),))
    table.print_table(verdict, next_step="then start the second stage")
    assert ("then start the second stage" in capsys.readouterr().out) is is_told
