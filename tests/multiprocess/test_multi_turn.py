"""Rollouts on real ranks with real engines: ranks that take different numbers of turns, and deaths in the middle."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.calculator_model import ensure_model
from tests.support.contract import STARTUP_S, expect_the_contract, inner_process, the_record
from tests.support.finished import JOB_S, finish, lines_of
from tests.support.launching import ROOT, Job, accelerate_command, free_port, kill, start, tiny_job_script

CONFIG = {
    **{"max_completion_length": 24, "per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 3},
    "vllm_engine_kwargs": {"enforce_eager": True, "block_size": 32},
}


def start_rollouts(
    model: Path, out: Path, *, turns: Sequence[int], nodes: int, hold: str = "", config: dict[str, Any] | None = None
) -> Job:
    script = tiny_job_script(model, out, config={**CONFIG, **(config or {})}, hold=hold, turns=turns)
    script[0] = str(ROOT / "tests" / "jobs" / "rollout_job.py")
    command = accelerate_command(script, nodes=nodes, ranks_per_node=len(turns) // nodes, port=free_port())
    return start(command, out, nodes=nodes)


def turns_of(job: Job, rank: int) -> list[dict[str, Any]]:
    """Of the first three steps, in the order of step, row and turn; they end in any."""
    lines = [line for line in lines_of(job, f"turns-{rank}.jsonl") if line["step"] < 3]
    return sorted(lines, key=lambda line: (line["step"], line["row"], line["turn"]))


def kill_in_mid_episode(job: Job, rank: int, hold: str) -> None:
    try:
        job.wait_for(f"at-{hold}", JOB_S)
        everyone = job.processes()
        kill(job.rank(rank)["pid"])
        expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end(may_leave=True)


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two nodes of two ranks: five turns, one, none and three. In the fourth step rank 1 is killed."""
    out = tmp_path_factory.mktemp("rollouts")
    job = start_rollouts(tiny_model, out, turns=[5, 1, 0, 3], nodes=2, hold="turn-3", config={"max_steps": 4})
    kill_in_mid_episode(job, 1, "turn-3")
    return job


def test_rollout_with_unequal_turns_per_rank_trains_all_steps(undisturbed: Job) -> None:
    steps = undisturbed.metrics()
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [len(turns_of(undisturbed, rank)) for rank in (0, 1, 3)] == [3 * 4 * turns for turns in (5, 1, 3)]
    assert not (undisturbed.output_dir / "ranks" / "turns-2.jsonl").exists()
    for line in steps:
        assert line["rollout/turns"] == 9 / 4
        assert line["rollout/refused"] == line["engine/restarts"] == 0
        assert line["engine/policy_version"] == line["step"] - 1
        assert 0.3 < line["rollout/cached_share"] < 0.9  # a block of every turn but the first


def test_rank_killed_in_episode_ends_job_with_one_record(undisturbed: Job) -> None:
    the_record(undisturbed, undisturbed.output(), says=["node 0", "rank 1", "rollout"])


@pytest.mark.long
def test_local_main_killed_in_episode_ends_job_with_one_record(tiny_model: Path, tmp_path: Path) -> None:
    job = start_rollouts(tiny_model, tmp_path / "out", turns=[3, 1], nodes=1, hold="turn-1")
    kill_in_mid_episode(job, 0, "turn-1")
    the_record(job, job.output(), says=["rank 0", "rollout"])


@pytest.mark.long
def test_engine_death_in_episode_changes_no_turn(undisturbed: Job, tiny_model: Path, tmp_path: Path) -> None:
    """All ranks of its node are in the middle of theirs; those of the other node are long done."""
    job = start_rollouts(tiny_model, tmp_path / "out", turns=[5, 1, 0, 3], nodes=2, hold="turn-1")
    try:
        job.wait_for("at-turn-1", STARTUP_S)
        (host,) = job.rank(0)["hosts"]
        inner_process(host).kill()
        (tmp_path / "out" / "go-on").touch()
    except BaseException:
        job.end()
        raise
    steps = finish(job)
    for rank in (0, 1, 3):
        assert turns_of(job, rank) == turns_of(undisturbed, rank)
    assert [line["reward"] for line in steps] == [line["reward"] for line in undisturbed.metrics()]
    assert steps[-1]["engine/restarts"] == 1


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(tmp_path_factory.mktemp("calculator") / "model")


@pytest.mark.long
@pytest.mark.parametrize("example", ["tools", "rollout"])
def test_calculator_example_raises_reward(example: str, calculator: Path, tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / f"{example}.py"), "--model", str(calculator), "--output_dir", str(tmp_path)]
    rewards = [line["reward"] for line in finish(start(accelerate_command(script, port=free_port()), tmp_path))]
    assert sum(rewards[:3]) / 3 < 0.5, rewards
    assert sum(rewards[-5:]) / 5 > 0.65, rewards


@pytest.mark.long
def test_guessing_example_takes_turns(calculator: Path, tmp_path: Path) -> None:
    """One that knows another tool, and seldom this one: what it calls is asked to be unknown, and the game goes on."""
    script = [str(ROOT / "examples" / "guessing.py"), "--output_dir", str(tmp_path), "--model", str(calculator)]
    steps = finish(start(accelerate_command([*script, "--max_steps", "2"], port=free_port()), tmp_path))
    assert [step["rollout/turns"] >= 1 for step in steps] == [True, True]
