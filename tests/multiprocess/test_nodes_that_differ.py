"""Two nodes of two ranks and one, with an engine each: the numbers of three ranks, resume, and an engine's death."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.ops.reshape.reshaping import reshape
from grpo.rollout.balance import plan_moves
from tests.support.contract import CONTRACT_S, STARTUP_S, inner_process
from tests.support.finished import finish_on_policy, lines_of
from tests.support.launching import (
    BIN,
    Job,
    free_port,
    kill,
    start,
    tiny_job_script,
)
from tests.support.tiny_models import save_tiny_model

RANKS = (2, 1)
STEPS, SAVED = 4, 2
# Four groups of three: the third one lies on both nodes. Node 0 has 8 rows, node 1 has 4.
CONFIG = {
    "per_device_train_batch_size": 4,
    "num_generations": 3,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "learning_rate": 4e-3,
}
REQUESTS = [[3, 3, 2], [1, 3]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-untied", tmp_path_factory.mktemp("model"))


def start_on(
    model: Path, out: Path, ranks: tuple[int, ...] = RANKS, *, hold: str = "", strikes: Sequence = (), **config: Any
) -> Job:
    """By `grpo launch`: torchrun's line for nodes that differ, accelerate's for others."""
    script = tiny_job_script(model, out, config={**CONFIG, **config}, hold=hold, strikes=[*strikes])
    nodes = [f"127.0.0.{node + 1}" for node in range(len(ranks))]
    port = str(free_port())

    def command(node: int) -> list[str]:
        where = ["--port", port, "--nodes", ",".join(nodes), "--node-rank", str(node)]
        return [str(BIN / "grpo"), "launch", *where, "--ranks-per-node", ",".join(map(str, ranks)), *script]

    return start(command, out, nodes=len(ranks))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = start_on(model, tmp_path_factory.mktemp("whole"))
    finish_on_policy(job, STEPS)
    return job


@pytest.mark.long
def test_unequal_nodes_split_rows_by_rank_and_requests_by_engine(whole: Job) -> None:
    """Each rank has four rows, and each engine samples six."""
    samples = [lines_of(whole, f"samples-{rank}.jsonl") for rank in range(3)]
    for step in range(STEPS):
        prompts = [row for of_rank in samples for row in of_rank[step]["prompts"]]
        assert len(prompts) == 12
        assert [len({*prompts[group : group + 3]}) for group in range(0, 12, 3)] == [1] * 4
        completions = [tuple(ids) for of_rank in samples for ids in of_rank[step]["completion_ids"]]
        assert len({*completions[6:9]}) == 3, "two samples of the group on both nodes are the same"
        rewards = [sum(ids) % 7 for ids in completions]
        assert whole.metrics()[step]["reward"] == pytest.approx(sum(rewards) / 12, abs=1e-5)
        assert len(whole.metrics()[step]["by_node"]["weight_sync/total_s"]) == 2
    (move,) = plan_moves(REQUESTS, [1, 1])
    assert (move.source, move.target, move.requests) == (0, 1, (2,))
    asked = [[line["n"] for line in lines_of(whole, f"asked-{main}.jsonl")] for main in (0, 2)]
    assert [sum(sizes) for sizes in asked] == [6 * STEPS, 6 * STEPS]
    assert not (whole.output_dir / "ranks" / "asked-1.jsonl").exists(), "rank 1 is no local main"
    (attempt,) = json.loads((whole.output_dir / "run.json").read_text())["attempts"]
    reported = attempt["topology"]
    assert (reported["ranks_by_node"], reported["engines_by_node"], reported["world_size"]) == ([2, 1], [1, 1], 3)
    logs = {path.name.removesuffix(".attempt-0.log") for path in (whole.output_dir / "logs").iterdir()}
    ranks = {"rank-node0-0", "rank-node0-1", "rank-node1-2"}
    assert logs == ranks | {"engine-node0-0", "engine-node1-0", "sentinel-node0", "sentinel-node1"}
    assert "of all nodes 2 + 1 ranks, 1 + 1 engines" in whole.output()
    for node, count in enumerate(RANKS):
        assert f"torchrun --nnodes 2 --nproc_per_node {count} --node_rank {node} " in whole.output()


@pytest.mark.long
def test_three_ranks_on_one_node_match_unequal_nodes(model: Path, whole: Job, tmp_path: Path) -> None:
    job = start_on(model, tmp_path / "one", (3,))
    finish_on_policy(job, STEPS)
    assert_same_rows(job, whole)
    for line, other in zip(job.metrics(), whole.metrics(), strict=True):
        assert line["reward"] == other["reward"]
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


@pytest.mark.long
def test_resume_on_unequal_nodes_is_bit_exact(model: Path, whole: Job, tmp_path: Path) -> None:
    out = tmp_path / "resumed"
    shutil.copytree(whole.output_dir / f"checkpoint-{SAVED}", out / f"checkpoint-{SAVED}")
    job = start_on(model, out, resume_from_checkpoint="auto")
    finish(job)
    assert "goes on after step 2" in job.output()
    assert_same_rows(job, whole, first=SAVED)
    assert [figures(line) for line in job.metrics()] == [figures(line) for line in whole.metrics()[SAVED:]]
    for rank in range(3):
        mine, theirs = (saved_tensors(each.output_dir, rank) for each in (job, whole))
        assert len(mine) > 3
        for one, other in zip(mine, theirs, strict=True):  # with what fills up the last shard, whatever it is
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.long
def test_resume_on_one_node_of_three_ranks_samples_same_rows(model: Path, whole: Job, tmp_path: Path) -> None:
    out = tmp_path / "moved"
    shutil.copytree(whole.output_dir / f"checkpoint-{SAVED}", out / f"checkpoint-{SAVED}")
    job = start_on(model, out, (3,), resume_from_checkpoint="auto")
    finish(job)
    assert "goes on after step 2" in job.output()
    assert_same_rows(job, whole, first=SAVED)


@pytest.mark.long
def test_resume_after_reshape_to_other_ranks_samples_same_rows(model: Path, whole: Job, tmp_path: Path) -> None:
    """For 2 + 1 ranks it is one for three; for 1 + 1 it is reshaped, and that one for three again."""
    checkpoint = whole.output_dir / f"checkpoint-{SAVED}"
    with pytest.raises(ValueError, match="is for 3 training processes already: resume from it"):
        reshape(checkpoint, tmp_path / "x" / checkpoint.name, ranks=3)
    for ranks in ((1, 1), (3,)):
        out = tmp_path / str(sum(ranks))
        settings = reshape(checkpoint, out / checkpoint.name, ranks=sum(ranks))
        job = start_on(model, out, ranks, resume_from_checkpoint="auto", **settings)
        finish(job)
        assert f"was written by 3 training processes and made for {sum(ranks)}" in job.output() or sum(ranks) == 3
        assert rows_of(job, sum(ranks)) == rows_of(whole, 3)[SAVED:]
        checkpoint = out / checkpoint.name


@pytest.mark.long
def test_engine_death_on_either_node_changes_no_sample(model: Path, whole: Job, tmp_path: Path) -> None:
    """That of the larger node in the third generation, that of the smaller one in the weight sync after it."""
    strikes = [("update_weights", 3, "inner", 2)]
    job = start_on(model, tmp_path / "struck", hold="generation-2", strikes=strikes)
    try:
        job.wait_for("at-generation-2", STARTUP_S)
        (host,) = job.rank(0)["hosts"]
        inner_process(host).suspend()  # so that it has not answered yet when it dies
        (job.output_dir / "go-on").touch()
        for rank in range(3):
            job.wait_for(f"at-waits-2-{rank}", CONTRACT_S)
        kill(host)
    except BaseException:
        job.end()
        raise
    finish(job)
    assert_same_rows(job, whole)
    assert [line["engine/restarts"] for line in job.metrics()] == [0, 0, 1, 2]
    reported = json.loads((job.output_dir / "run_state.json").read_text())["restarts"]
    assert [each.partition(" (")[0] for each in reported] == [
        "after step 2: engine 0 of node 0",
        "after step 3: engine 0 of node 1",
    ]


def finish(job: Job) -> None:
    try:
        codes = job.wait(STARTUP_S + CONTRACT_S)
        assert codes == [0] * len(codes), job.fail(f"launchers exited {codes}")
    finally:
        job.end()


def figures(line: dict) -> list[float]:
    return [line[name] for name in ("step", "reward", "loss", "grad_norm")]


def assert_same_rows(job: Job, whole: Job, *, first: int = 0) -> None:
    for rank in range(3):
        name = f"samples-{rank}.jsonl"
        assert lines_of(job, name) == lines_of(whole, name)[first:]


def rows_of(job: Job, ranks: int) -> list[list[tuple]]:
    """Of each step, over all ranks in order: prompts and completions."""
    samples = [lines_of(job, f"samples-{rank}.jsonl") for rank in range(ranks)]
    return [
        [row for part in parts for row in zip(part["prompts"], part["completion_ids"], strict=True)]
        for parts in zip(*samples, strict=True)
    ]


def saved_tensors(out: Path, rank: int) -> list[torch.Tensor]:
    """Master weights and moments of a rank after the last step."""
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    (file,) = (out / f"checkpoint-{STEPS}").glob(f"global_step*/*{name}")
    return [*tensors_in(torch.load(file, weights_only=False))]


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)
