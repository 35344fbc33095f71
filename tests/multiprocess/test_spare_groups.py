"""Spare groups over ranks and nodes with real engines: what is trained on follows from the groups' numbers alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo.rollout.spares import chosen_groups, flat_groups
from tests.support.finished import MAX_GAP, finish, lines_of
from tests.support.launching import start_tiny_job
from tests.support.resumed_runs import expect, run, seen, steps
from tests.support.tiny_models import save_tiny_model

NUM_GENERATIONS = 4


def trained(rewards: list[float], num_spares: int) -> tuple[float, float]:
    """Mean reward of the completions to train on, and the share of flat groups among theirs, by the rule."""
    groups = np.array(rewards).reshape(-1, NUM_GENERATIONS)
    is_flat = flat_groups(groups[..., None])
    chosen = chosen_groups(is_flat, len(groups) - num_spares)
    return float(groups[chosen].mean()), float(is_flat[chosen].mean())


def check(line: dict[str, Any], rewards: list[float], num_spares: int) -> None:
    reward, flat = trained(rewards, num_spares)
    assert line["reward"] == pytest.approx(reward, abs=1e-5), line["step"]
    assert line["spare_groups/frac_zero_std_trained"] == pytest.approx(flat), line["step"]
    assert line["spare_groups/extra_completions"] == num_spares * NUM_GENERATIONS


def test_spare_groups_over_two_nodes_keep_rows_intact(tmp_path: Path) -> None:
    """Two nodes of two ranks, a batch ahead: log-probabilities of engine and trainer agree, so tokens are their own."""
    model, spares = save_tiny_model("llama-untied", tmp_path / "model"), 3
    config = {"per_device_train_batch_size": 5, "spare_groups": spares, "generation_lookahead": 1}
    config |= {"learning_rate": 0.0, "max_steps": 3}
    job = start_tiny_job(model, tmp_path / "out", config=config, nodes=2, ranks_per_node=2)
    lines = finish(job)
    assert len(lines) == 3
    ranks = [lines_of(job, f"samples-{rank}.jsonl") for rank in range(4)]
    for line, calls in zip(lines, zip(*ranks, strict=True), strict=True):
        assert [len(call["prompts"]) for call in calls] == [8] * 4  # 5 groups of 4, and 3 more: groups of 2 ranks each
        check(line, [float(sum(ids) % 7) for call in calls for ids in call["completion_ids"]], spares)
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
    kept = [line["spare_groups/used"] for line in lines]
    assert all(0 <= used <= spares for used in kept)


@pytest.mark.long
def test_resume_with_spare_groups_after_kill_matches_whole_run(tiny_model: Path, tmp_path: Path) -> None:
    """Every second prompt is flat; a group lies on two ranks."""
    spares = 1
    config = {"max_steps": 6, "save_steps": 2, "use_vllm": True, "check_rewards": False, "spare_groups": spares}
    config |= {"vllm_max_model_length": 64, "vllm_engine_kwargs": {"enforce_eager": True}}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given: dict[str, Any] = {"num_prompts": 40, "flat_evens": True}
    expect(run(tiny_model, whole, config=config, **given), success=True)
    for number, line in steps(whole).items():
        calls = [seen(whole, rank)[number - 1] for rank in (0, 1)]
        rewards = []
        for call in calls:
            for prompt, ids in zip(call["prompts"], call["completions"], strict=True):
                rewards.append(3.0 if int(prompt.partition("+")[0]) % 2 == 0 else float(sum(ids) % 7))
        check({**line, "step": number}, rewards, spares)
    assert {line["frac_reward_zero_std"] for line in steps(whole).values()} > {0.0}

    expect(run(tiny_model, parts, config=config, kill_in_save=4, **given), success=False)
    resume = {**config, "resume_from_checkpoint": "auto"}
    assert "goes on after step 2" in expect(run(tiny_model, parts, attempt=1, config=resume, **given), success=True)
    names = ("reward", "loss", "grad_norm", "num_tokens", "spare_groups/used", "frac_reward_zero_std")
    assert [[line[name] for name in names] for line in steps(parts).values()] == [
        [line[name] for name in names] for line in steps(whole).values()
    ]
    assert (parts / "weights").read_text() == (whole / "weights").read_text()
