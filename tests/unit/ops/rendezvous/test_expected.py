"""Which nodes are expected, and which of them this is."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo.ops.rendezvous.expected import Place, add_arguments, expand_hostlist, find_place, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a,b", ["a", "b"]),
        ("n[1-2,5]", ["n1", "n2", "n5"]),
        ("gpu-[08-10]-x,login", ["gpu-08-x", "gpu-09-x", "gpu-10-x", "login"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("n1\nn2\n", ["n1", "n2"]),
        ("", []),
    ],
)
def test_expand_hostlist_matches_table(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


def test_read_hostfile_reads_mpi_format(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nn1 slots=8\n\nn[2-3] # two more\n")
    assert read_hostfile(file) == ["n1", "n2", "n3"]
    with pytest.raises(ValueError, match=r"--hostfile \S+/host cannot be read: there is no such file in .* mean host"):
        read_hostfile(file.with_name("host"))


def place(*options: str, env: dict[str, str] | None = None, is_local: Callable[[str], bool] = lambda _: False) -> Place:
    parser = argparse.ArgumentParser()
    add_arguments(parser, default_port=1)
    args = parser.parse_args(options)
    return find_place(args, env or {}, command="grpo test", hostname="n2.cluster", is_local=is_local)


def test_find_place_identifies_this_node() -> None:
    assert place().nodes == ("n2.cluster",)
    assert place("--nodes", "n1,n2").node == "n2"
    assert place("--nodes", "n1,n2.cluster").node == "n2.cluster"
    assert place("--nodes", "n1,n3", "--node-rank", "1").node == "n3"
    assert place("--nodes", "10.0.0.1,10.0.0.2", is_local=lambda name: name == "10.0.0.2").node == "10.0.0.2"
    slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_NODEID": "1"}
    assert place(env=slurm).nodes == ("n3", "n4")
    assert place(env=slurm).node == "n4"
    assert place(env={**slurm, "SLURMD_NODENAME": "n3"}).node == "n3"
    assert place("--node-rank", "1", env={**slurm, "SLURMD_NODENAME": "n3"}).node == "n4"
    assert place("--nodes", "n1,n2", env=slurm).node == "n2"


def test_find_place_takes_first_or_named_node_as_head() -> None:
    first, named = place("--nodes", "n1,n2"), place("--nodes", "n1,n2", "--head", "10.0.0.1")
    assert (first.head, first.head_address) == ("n1", "n1")
    assert (named.head, named.head_address) == ("n1", "10.0.0.1")
    assert place("--nodes", "n1,n2", "--head", "n2").is_head


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nodes n1,n3", r"none of n1, n3 .*\(n2.cluster\) \[GRPO-304\].*--node-rank.*srun .* grpo test$"),
        ("--nodes n2,n1,n2", "n2 stands twice"),
        ("--nodes n1,n2 --node-rank 2", "node rank 2 is outside 0 .. 1"),
        ("--nodes n1,n2 --node-name n9", "--node-name n9 is none of"),
        ("--nodes a,b", "a, b all are .*GRPO-304"),
        ("--nodes n1,n2 --nodes-file hosts", "give one of them"),
    ],
)
def test_find_place_with_contradicting_options_raises(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(*options.split(), is_local=lambda name: name in "ab")


def test_find_place_reads_nodes_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1\nn2\n")
    assert place("--nodes-file", str(file)).nodes == ("n1", "n2")
    file.write_text("# nobody\n")
    with pytest.raises(ValueError, match=f"{file} names no node"):
        place("--nodes-file", str(file))


def test_join_timeout_in_kubernetes_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def default_timeout() -> float:
        parser = argparse.ArgumentParser()
        add_arguments(parser, default_port=1)
        return parser.parse_args([]).join_timeout

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert default_timeout() == 60
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert default_timeout() == 900
