"""The bandwidth stage without a job: a wrong start, and what measured seconds mean."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from grpo.ops.doctor import bandwidth
from grpo.ops.doctor.bandwidth_verdict import (
    RankResult,
    bus_gb_per_s,
    explain_failure,
    find_slow,
    judge_bandwidth,
    name_nodes,
    partners_of,
)
from grpo.ops.doctor.records import Status
from grpo.place.launch import Launch

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


def test_bandwidth_with_one_rank_exits_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert bandwidth.main([]) == 2
    assert "one rank has nobody to exchange with" in capsys.readouterr().err


def test_parse_arguments_with_missing_config_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bandwidth.parse_arguments(["--config", "no.yaml"])
    assert caught.value.code == 2
    assert "no.yaml" in capsys.readouterr().err


def test_route_to_another_node_names_interface() -> None:
    launch = Launch(rank=0, local_rank=0, world_size=2, local_world_size=1, node=0, num_nodes=2)
    store = dist.HashStore()
    assert bandwidth._route_to_another_node(launch, store) == "", "the other one never came"
    store.set("at/1", json.dumps([0, "start", "127.0.0.1"]))
    assert bandwidth._route_to_another_node(launch, store) == "lo"


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7, 8])
def test_partners_of_node_cover_every_pair_in_disjoint_rounds(num_nodes: int) -> None:
    partners = [partners_of(node, num_nodes) for node in range(num_nodes)]
    for met in zip(*partners, strict=True):
        assert all(met[partner] == node for node, partner in enumerate(met)), "a partner has another partner"
    pairs = [(node, met) for node, row in enumerate(partners) for met in row if node < met]
    assert sorted(pairs) == [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    assert len(partners_of(5, 64)) == 8


def test_find_slow_distinguishes_slow_node_from_path() -> None:
    healthy = {(0, 1): 40.0, (0, 2): 41.0, (0, 3): 39.0, (1, 2): 40.0, (1, 3): 38.0, (2, 3): 42.0}
    assert find_slow(healthy) == {}
    slow_node = {**healthy, (0, 2): 9.0, (1, 2): 10.0, (2, 3): 8.0}
    assert find_slow(slow_node) == {2: 10.0}
    slow_path = {**healthy, (1, 3): 5.0}
    assert find_slow(slow_path) == {}
    two_slow = {**healthy, (0, 1): 9.0, (0, 2): 9.0, (0, 3): 9.0, (1, 2): 9.0, (1, 3): 9.0}
    assert set(find_slow(two_slow)) == {0, 1}
    assert find_slow({(0, 1): 1.0}) == {}
    assert find_slow({}) == {}


def test_bus_gb_per_s_matches_hand_calculation() -> None:
    assert bus_gb_per_s("all-gather", 4_000_000_000, 4, 1.0) == pytest.approx(3.0)
    assert bus_gb_per_s("all-reduce", 4_000_000_000, 4, 1.0) == pytest.approx(6.0)


def test_judge_bandwidth_with_slow_node_warns() -> None:
    """Three nodes of two ranks; node 2 is slow with both others. Seconds by hand: 1 GB from each of 2 ranks."""
    results = []
    for node, partners in enumerate([{1: 0.1, 2: 1.0}, {0: 0.1, 2: 1.0}, {0: 1.0, 1: 0.8}]):
        for _ in range(2):
            results.append(
                RankResult(
                    node=node,
                    host=f"n{node}",
                    inside_s={"all-reduce": 0.1, "all-gather": 0.1},
                    across_s={"all-reduce": 2.0, "all-gather": 1.0 + node},
                    pairs_s=tuple(partners.items()),
                )
            )
    results[3] = replace(results[3], broken={"bfloat16": "no"})
    assert RankResult.loads(results[3].dumps()) == results[3]
    verdict = judge_bandwidth(results, backend="nccl", num_bytes=10**9, pair_bytes=10**9, model_bytes=15 * 10**9)
    reported = {(f.check, f.status): f.message for f in verdict.findings}
    assert reported["number formats", WARN] == "nccl on CPUs does not carry bfloat16: no"
    assert reported["inside a node", PASS] == "all-reduce 10.00..10.00 GB/s, all-gather 5.00..5.00 GB/s among 2 ranks"
    assert reported["across nodes", PASS] == "all-reduce 0.83 GB/s, all-gather 0.28 GB/s over 6 ranks on 3 nodes"
    assert reported["one weight sync", PASS].startswith("about 45.0 s to gather 15.0 GB")
    assert reported["pairs of nodes", WARN] == "n2 is slow: 2.00 GB/s with its best partner, 20.00 between others"
    assert verdict.exit_code == 0


def test_judge_bandwidth_with_uneven_ranks_matches_hand_calculation() -> None:
    """Two ranks, one and three, by hand: 1 GB from one rank of each; what one rank does alone is no exchange."""
    results = [
        RankResult(
            node=node,
            host=f"n{node}",
            inside_s={"all-reduce": 0.1 * ranks},
            across_s={"all-reduce": 1.0},
            pairs_s=tuple((other, 0.1) for other in range(3) if other != node and local_rank == 0),
        )
        for node, ranks in enumerate((2, 1, 3))
        for local_rank in range(ranks)
    ]
    verdict = judge_bandwidth(results, backend="nccl", num_bytes=10**9, pair_bytes=10**9, model_bytes=None)
    reported = {(f.check, f.status): f.message for f in verdict.findings}
    # 2 x 1/2 x 1 GB in 0.2 s, and 2 x 2/3 x 1 GB in 0.3 s
    assert reported["inside a node", PASS] == "all-reduce 4.44..5.00 GB/s among 2..3 ranks"
    assert reported["across nodes", PASS] == "all-reduce 1.67 GB/s over 6 ranks on 3 nodes"
    assert reported["pairs of nodes", PASS] == "10.00 (n0 and n1) to 10.00 GB/s each way between 3 pairs"


def test_judge_bandwidth_names_slow_node_and_slow_path() -> None:
    seconds = {(0, 1): 0.1, (0, 2): 0.1, (0, 3): 0.1, (1, 2): 0.1, (1, 3): 1.0, (2, 3): 0.1}
    results = [
        RankResult(
            node=node,
            host=f"n{node}",
            inside_s={"all-gather": 0.1 if node else 0.2},
            pairs_s=tuple((sum(pair) - node, s) for pair, s in seconds.items() if node in pair),
        )
        for node in range(4)
        for _ in range(2)
    ]
    verdict = judge_bandwidth(results, backend="gloo", num_bytes=10**9, pair_bytes=10**9, model_bytes=None)
    found = {f.check: (f.status, f.nodes, f.message) for f in verdict.findings}
    assert found["inside a node"] == (WARN, ("n0",), "all-gather 2.50 GB/s on n0, up to 5.00 elsewhere")
    all_nodes, paths = ("n0", "n1", "n2", "n3"), "2.00 (n1 and n3) to 20.00 GB/s each way between 6 pairs"
    assert found["pairs of nodes"] == (PASS, all_nodes, paths)


def test_judge_bandwidth_of_one_node_skips_cross_node_checks() -> None:
    results = [RankResult(node=0, host="n", inside_s={"all-reduce": 0.1}, across_s={}, pairs_s=()) for _ in range(2)]
    verdict = judge_bandwidth(results, backend="gloo", num_bytes=10**9, pair_bytes=10**9, model_bytes=None)
    checks = {finding.check for finding in verdict.findings}
    assert "inside a node" in checks
    assert checks.isdisjoint({"across nodes", "pairs of nodes", "one weight sync"})


def test_name_nodes_on_one_host_numbers_them() -> None:
    assert name_nodes(["x", "y", "x"]) == ("x/0", "y", "x/2")


def test_explain_failure_names_settings_to_change() -> None:
    def fix(stage: str, backend: str = "nccl", late: tuple[str, ...] = (), num_nodes: int = 2) -> str:
        one = num_nodes == 1
        verdict = explain_failure(stage, "no end", late, backend, route_interface="eth1", is_one_node=one)
        assert verdict.exit_code == 1
        return verdict.findings[0].fix

    across = fix("across nodes: all-reduce")
    assert "NCCL_SOCKET_IFNAME=eth1" in across
    assert "NCCL_IB_DISABLE=1" in across
    assert "ddp_backend: gloo and vllm_sync_backend: shm" in across
    assert "NCCL_P2P_DISABLE=1" in fix("inside a node: all-reduce")
    assert "GLOO_SOCKET_IFNAME=eth1" in fix("across nodes: all-reduce", backend="gloo")
    assert "node 1 (n1)" in fix("across nodes: all-reduce", late=("node 1 (n1)",))


def test_broken_formats_names_refused_and_wrong_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor) -> None:
        """As rank 0 of three sees it: the last one adds 2."""
        if tensor.dtype is torch.bfloat16:
            raise RuntimeError("Invalid scalar type\nException raised from all_reduce")
        tensor += 2
        if tensor.dtype is torch.float16:
            tensor[3:] += 1

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    launch = Launch(rank=0, world_size=3, local_rank=0, local_world_size=3, node=0, num_nodes=1)
    broken = bandwidth.broken_formats(launch, torch.device("cpu"), ("float32", "bfloat16", "float16"))
    assert broken == {"bfloat16": "Invalid scalar type", "float16": "1 + 2 is 3, 4"}


@pytest.mark.parametrize(
    ("job", "broken", "reported"),
    [
        (None, {}, [(PASS, "gloo on CPUs carries float32, bfloat16, float16")]),
        (("float32", "float16"), {}, [(PASS, "gloo on CPUs carries float32, float16")]),
        (None, {"bfloat16": "no"}, [(WARN, "gloo on CPUs does not carry bfloat16: no")]),
        (None, {"float32": "no"}, [(FAIL, "gloo on CPUs does not carry float32: no")]),
        (("float32", "bfloat16"), {"bfloat16": "no"}, [(FAIL, "gloo on CPUs does not carry bfloat16: no")]),
    ],
)
def test_judge_bandwidth_with_broken_job_format_fails(
    job: tuple[str, ...] | None, broken: dict[str, str], reported: list[tuple[Status, str]]
) -> None:
    results = [RankResult(node=0, host="n"), RankResult(node=0, host="n", broken=broken)]
    verdict = judge_bandwidth(
        results, backend="gloo", num_bytes=8, pair_bytes=8, model_bytes=None, device="CPUs", job_dtypes=job
    )
    assert [(each.status, each.message) for each in verdict.findings if each.check == "number formats"] == reported
