"""Do nodes run the same software: what differs is named, with the nodes."""

from dataclasses import replace

import pytest

from grpo.ops.rendezvous.agreement import Software, compare_software, read_software
from grpo.ops.rendezvous.trouble import list_nodes
from grpo.place.same_everywhere import read_variables


def test_list_nodes_with_many_nodes_shortens_list() -> None:
    assert list_nodes(["a", "b"]) == "a, b"
    many = [f"n{number}" for number in range(64)]
    reported = list_nodes(many)
    assert reported.startswith("n0, n1, ")
    assert reported.endswith(" more")
    assert len(reported) < 100


def test_read_variables_ignores_debug_variables() -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "x", "NCCL_ALGO": "Ring", "GLOO_SOCKET_IFNAME": "eth0", "A": "b"}
    assert read_variables(env) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_ALGO": "Ring"}


def test_read_software_finds_versions_and_code_digest() -> None:
    found = read_software({"NCCL_ALGO": "Ring"})
    assert {"python", "torch", "grpo-local"} <= set(found.versions)
    assert (found.variables, len(found.code_digest)) == ({"NCCL_ALGO": "Ring"}, 12)


def software(**changes: object) -> Software:
    good = Software(versions={"torch": "2.13.0", "vllm": "0.31.0"}, commit="abc", code_digest="123")
    return replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "what", "message", "is_fatal"),
    [
        ({"versions": {"torch": "2.13.0"}}, "versions", "vllm: 0.31.0 on a, c; none on b", True),
        ({"commit": "def"}, "code", "commit: abc on a, c; def on b", True),
        ({"code_digest": "9"}, "code", "source files, in the same commit: 123 on a, c; 9 on b", True),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "variables", "NCCL_ALGO: none on a, c; Ring on b", True),
        ({"variables": {"NCCL_IB_HCA": "mlx5"}}, "variables", "NCCL_IB_HCA: none on a, c; mlx5 on b", False),
    ],
)
def test_compare_software_with_differing_node_names_it(changes: dict, what: str, message: str, is_fatal: bool) -> None:
    found = compare_software({"a": software(), "b": software(**changes), "c": software()})
    (trouble,) = found.pop(what)
    assert (trouble.message, trouble.nodes, trouble.is_fatal) == (message, ("b",), is_fatal)
    assert trouble.fix
    assert not any(found.values())


def test_compare_software_on_tie_blames_other_node_than_head() -> None:
    (trouble,) = compare_software({"a": software(commit="new"), "b": software()})["code"]
    assert (trouble.nodes, trouble.message) == (("b",), "commit: new on a; abc on b")


def test_compare_software_without_commit_compares_source_files() -> None:
    """Not installed, a checkout of another owner, a file system that is slow."""
    nodes = {"a": software(), "b": software(commit=""), "c": software(code_digest="9", commit="")}
    assert not compare_software({"a": nodes["a"], "b": nodes["b"]})["code"]
    (trouble,) = compare_software(nodes)["code"]
    assert (trouble.message, trouble.nodes) == ("source files: 123 on a, b; 9 on c", ("c",))
    (trouble,) = compare_software({**nodes, "c": software(commit="def")})["code"]
    assert (trouble.message, trouble.nodes) == ("commit: abc on a; def on c", ("c",))
