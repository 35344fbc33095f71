"""How many ranks a node gets."""

from dataclasses import replace
from typing import Any

import pytest

from grpo.faults.failure import FailureKind
from grpo.ops.launch.agreement import NodeReport, decide
from grpo.ops.launch.ranks import Asked, LostGPUs, Ranks, ranks_by_node
from grpo.ops.rendezvous.expected import Place
from grpo.place.files import Wishes, read_wishes

EIGHT = {"a": 8, "b": 8}
FILE = {"file": "4node.yaml", "num_processes": 28, "num_machines": 4}


def ask(**given: Any) -> Asked:
    """With fields of `Asked`, or of its wishes."""
    wished = {name: given.pop(name) for name in [*given] if name in Wishes.__dataclass_fields__}
    return Asked(wishes=replace(read_wishes([]), **wished), **given)


@pytest.mark.parametrize(
    ("asked", "gpus", "count", "why"),
    [
        # what is given first counts: flag, scheduler, the script's inference GPUs, the file, the GPUs
        (ask(flag=(3,), scheduler="4", reserved_gpus=2, **FILE), EIGHT, 3, "--ranks-per-node"),
        (ask(scheduler="4", reserved_gpus=2, **FILE), EIGHT, 4, "PET_NPROC_PER_NODE"),
        (ask(scheduler="auto", reserved_gpus=2, **FILE), EIGHT, 6, "8 GPUs less vllm_reserved_gpus 2"),
        (ask(reserved_gpus=2, **FILE), {"a": 7, "b": 7}, 5, "7 GPUs less vllm_reserved_gpus 2"),
        (ask(**FILE), EIGHT, 7, "num_processes 28 / num_machines 4 of 4node.yaml"),
        (ask(num_processes=7, file="1node.yaml"), EIGHT, 7, "num_processes 7 / num_machines 1 of 1node.yaml"),
        (ask(tensor_parallel_size=2), EIGHT, 6, "8 GPUs less 2 for an engine"),
        (ask(), {"a": 4, "b": 4}, 3, "4 GPUs less 1 for an engine"),
        (ask(flag=(8,), has_engines=False), EIGHT, 8, "--ranks-per-node"),  # TRL's own modes
        (ask(has_engines=False), EIGHT, 8, "8 GPUs less 0 for an engine"),
        # without GPUs
        (ask(), {"a": 0}, 1, "no GPU here"),
        (
            ask(num_processes=2, file="cpu.yaml", use_cpu=True),
            {"a": 0},
            2,
            "num_processes 2 / num_machines 1 of cpu.yaml",
        ),
        (ask(**FILE), {"a": 0}, 1, "no GPU here"),  # a file for GPUs
        (ask(flag=(4,), reserved_gpus=1), {"a": 0}, 4, "--ranks-per-node"),
    ],
)
def test_ranks_by_node_takes_first_given_source(asked: Asked, gpus: dict[str, int], count: int, why: str) -> None:
    ranks = ranks_by_node(asked, gpus)
    assert (ranks.by_node, ranks.why) == ((count,) * len(gpus), why)


@pytest.mark.parametrize(
    ("asked", "gpus", "counts", "why"),
    [
        (ask(), (8, 7), (7, 6), "the GPUs of each node less 1 for an engine"),
        (ask(reserved_gpus=2, **FILE), (8, 8, 7, 8), (6, 6, 5, 6), "the GPUs of each node less vllm_reserved_gpus 2"),
        (ask(tensor_parallel_size=2), (8, 4), (6, 2), "the GPUs of each node less 2 for an engine"),
        (ask(reserved_gpus=4), (8, 5), (4, 1), "the GPUs of each node less vllm_reserved_gpus 4"),
        (ask(has_engines=False), (8, 7), (8, 7), "the GPUs of each node less 0 for an engine"),
        (ask(flag=(4, 3)), (8, 8), (4, 3), "--ranks-per-node"),
        (ask(flag=(6,)), (8, 7), (6, 6), "--ranks-per-node"),  # as many on all: more engines where there are more GPUs
        (ask(flag=(2, 1)), (0, 0), (2, 1), "--ranks-per-node"),
    ],
)
def test_ranks_by_node_with_uneven_gpus_follows_each_node(
    asked: Asked, gpus: tuple[int, ...], counts: tuple[int, ...], why: str
) -> None:
    nodes = dict(zip("abcd", gpus, strict=False))
    assert ranks_by_node(asked, nodes) == Ranks(by_node=counts, why=why)
    place = Place(nodes=tuple(nodes), node="a", head_address="a", port=1, command="grpo launch")
    reports = {"a": NodeReport(gpus=gpus[0])} | {node: NodeReport(gpus=nodes[node]) for node in reversed(nodes)}
    agreed = decide(place, reports, asked, port=1).agreed  # in the order of nodes, whoever came first
    assert agreed is not None
    assert agreed.ranks_by_node == counts


@pytest.mark.parametrize(
    ("asked", "gpus", "said"),
    [
        (
            ask(**FILE),
            {"a": 8, "b": 4},
            r"7 ranks per node .* leave no engine a GPU: b has 4, .* --ranks-per-node 7,3$",
        ),
        (ask(flag=(7, 7)), {"a": 8, "b": 7}, r"7 ranks per node .* b has 7, .* give --ranks-per-node 7,6$"),
        (ask(flag=(7, 0)), EIGHT, r"0 ranks per node \(--ranks-per-node\): a node needs at least 1"),
        (ask(flag=(7, 7, 7)), EIGHT, r"--ranks-per-node 7,7,7 is for 3 nodes, and there are 2"),
        (ask(flag=(8,)), EIGHT, r"8 ranks per node \(--ranks-per-node\) .* a has 8, .* give --ranks-per-node 7"),
        (ask(flag=(7,), reserved_gpus=2), EIGHT, r"of which an engine takes 2: give --ranks-per-node 6"),
        (ask(), {"a": 1}, r"a has 1 usable GPU, too few to train beside the 1 of an engine: make more visible"),
        (ask(reserved_gpus=8), EIGHT, r"a has 8 usable GPUs, too few .* lower vllm_reserved_gpus"),
        (ask(flag=(0,)), EIGHT, r"0 ranks per node \(--ranks-per-node\): a node needs at least 1"),
        (
            ask(file="x.yaml", num_processes=30, num_machines=4),
            EIGHT,
            r"x.yaml has num_processes: 30, no multiple of its num_machines: 4",
        ),
    ],
)
def test_ranks_by_node_with_impossible_ranks_raises(asked: Asked, gpus: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ranks_by_node(asked, gpus)


def test_ranks_by_node_with_lost_gpu_on_resume_raises() -> None:
    """Its checkpoint is for as many as there were; another allocation has them."""
    asked = ask(reserved_gpus=1, resumed_ranks=28)
    lost = {"a": 8, "b": 8, "c": 7, "d": 8}
    with pytest.raises(LostGPUs, match=r"^c has 7 usable GPUs, and the checkpoint .* is for 28 ranks, 7 on each node"):
        ranks_by_node(asked, lost)
    place = Place(nodes=tuple(lost), node="a", head_address="a", port=1, command="grpo launch")
    verdict = decide(place, {node: NodeReport(gpus=count) for node, count in lost.items()}, asked, port=1)
    assert (verdict.agreed, verdict.kind) == (None, FailureKind.MACHINE)
    # What fits, and a job that somebody has moved to other machines: the trainer says what to do.
    assert ranks_by_node(asked, dict.fromkeys("abcd", 8)).by_node == (7, 7, 7, 7)
    assert ranks_by_node(asked, dict.fromkeys("abcd", 4)).by_node == (3, 3, 3, 3)
    assert ranks_by_node(asked, {"a": 8, "b": 7, "c": 8}).by_node == (7, 6, 7)
    # A checkpoint for as many as nodes that differ have, and one that was reshaped for them.
    assert ranks_by_node(replace(asked, resumed_ranks=14), {"a": 9, "b": 7}).by_node == (8, 6)
    assert ranks_by_node(replace(asked, resumed_ranks=27), lost).by_node == (7, 7, 6, 7)


def test_decide_without_gpus_blames_machine_on_one_node_user_on_all() -> None:
    place = Place(nodes=("a", "b"), node="a", head_address="a", port=1, command="grpo launch")
    none = NodeReport(gpus=0, mistake="torch is built for CUDA 12.9, but sees no GPU")
    one = decide(place, {"a": NodeReport(gpus=8), "b": none}, ask(), port=1)
    assert (one.agreed, one.kind) == (None, FailureKind.MACHINE)
    assert [trouble.message for trouble in one.troubles] == [f"b: {none.mistake}"]
    both = decide(place, {"a": none, "b": none}, ask(), port=1)
    assert (both.agreed, both.kind) == (None, FailureKind.USER)
