"""Evaluation in a job as users start it, and by `grpo eval`: sets with sampling of their own, pass@k of groups."""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo import cli
from grpo.ops.report.completions import read_completions
from grpo.ops.train.demo import MODEL
from grpo.rewards.passes import best_of
from tests.support.finished import JOB_S
from tests.support.hashed_reward import LOG_VARIABLE
from tests.support.launching import ROOT, Job, accelerate_command, free_port, start

NUM_GENERATIONS, RANKS, STEPS = 4, 2, (1, 2)
SETS = {"greedy": 5, "hot": 7}  # groups of 4 in batches of 12: the last one of each is filled up


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A job that has evaluated two sets after each of two steps of learning rate 0."""

    job: Job
    folder: Path
    lines: dict[str, dict[int, dict[str, Any]]]
    """What was logged, by set and step."""

    def completions(self, of_set: str, step: int) -> list[tuple[str, str, float]]:
        """Prompt, completion and reward of each row, in the order of the job's rows, as the function was given them."""
        ranks = []
        for rank in range(RANKS):
            calls = map(json.loads, (self.folder / f"rewards-{rank}.jsonl").open())
            ranks.append([call for call in calls if call["step"] == step and {*call["set"]} == {of_set}])
        rows = []
        for batch in zip(*ranks, strict=True):
            for call in batch:
                rows += [*zip(call["prompts"], call["completions"], call["rewards"], strict=True)]
        return rows[: SETS[of_set] * NUM_GENERATIONS]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    folder = tmp_path_factory.mktemp("evaluated")
    for name, (first, count) in {"train": (0, 16), "greedy": (20, SETS["greedy"]), "hot": (40, SETS["hot"])}.items():
        rows = [{"prompt": f"{10 + first + row}+{row + 20}=", "of_set": name} for row in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, sets = folder / "out", {name: str(folder / f"{name}.jsonl") for name in SETS}
    script = [str(ROOT / "train.py"), "--model_name_or_path", str(MODEL), "--dataset_name", str(folder / "train.jsonl")]
    script += ["--reward_funcs", "tests.support.hashed_reward.hashed", "--eval_datasets", json.dumps(sets)]
    script += ["--eval_temperature", "1.3", "--eval_sets", '{"greedy": {"temperature": 0, "max_completion_length": 2}}']
    script += ["--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "6"]
    script += ["--num_generations_eval", str(NUM_GENERATIONS), "--max_steps", "2", "--save_steps", "1"]
    script += ["--learning_rate", "0", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1"]
    script += ["--max_completion_length", "4", "--vllm_max_model_length", "32", "--logging_steps", "1"]
    script += [
        "--vllm_engine_kwargs",
        '{"enforce_eager": true}',
        "--bf16",
        "false",
        "--gradient_checkpointing",
        "false",
    ]
    script += ["--report_to", "none", "--output_dir", str(out)]
    job = start(accelerate_command(script, port=free_port()), out, env={LOG_VARIABLE: str(folder)})
    try:
        assert job.wait(JOB_S) == [0], job.fail("it did not train")
    finally:
        job.end()
    lines: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in SETS}
    for line in map(json.loads, (out / "metrics.jsonl").open()):
        for name in SETS:
            if f"eval_{name}_reward" in line:
                lines[name][line["step"]] = line
    return Evaluated(job=job, folder=folder, lines=lines)


@pytest.mark.parametrize("of_set", SETS)
@pytest.mark.parametrize("step", STEPS)
def test_pass_at_k_matches_reward_log(of_set: str, step: int, evaluated: Evaluated) -> None:
    rows = evaluated.completions(of_set, step)
    groups = [rows[start : start + NUM_GENERATIONS] for start in range(0, len(rows), NUM_GENERATIONS)]
    assert [len({prompt for prompt, *_ in group}) for group in groups] == [1] * SETS[of_set]
    rewards = np.array([[reward for *_, reward in group] for group in groups])
    line = evaluated.lines[of_set][step]
    for k in (1, 2, 4):
        assert line[f"eval_{of_set}_pass@{k}"] == pytest.approx(best_of(rewards, k).mean(), abs=1e-6)
    assert line[f"eval_{of_set}_avg@4"] == pytest.approx(rewards.mean(), abs=1e-6)


def test_eval_sets_use_their_sampling_settings(evaluated: Evaluated) -> None:
    """Greedy twice is equal, as the weights are, while others differ from step to step."""
    greedy, hot = ([evaluated.completions(of_set, step) for step in STEPS] for of_set in SETS)
    assert greedy[0] == greedy[1]
    assert hot[0] != hot[1]
    for rows in greedy:
        assert all(one[1] == other[1] for one, other in pairwise(rows) if one[0] == other[0])
    assert {line["eval_greedy_completions/max_length"] for line in evaluated.lines["greedy"].values()} == {2}
    assert min(line["eval_hot_completions/max_length"] for line in evaluated.lines["hot"].values()) > 2
    assert not [name for line in evaluated.lines["hot"].values() for name in line if "sampling/" in name]


def test_read_completions_of_eval_sets_lists_all_steps(evaluated: Evaluated) -> None:
    out = evaluated.folder / "out"
    rows = pq.read_table(out / "completions" / "eval-hot-step-00000002.parquet").to_pylist()
    assert {row["completion"] for row in rows} <= {said for _, said, _ in evaluated.completions("hot", 2)}
    missing: list[str] = []
    browser = read_completions(out, missing)
    assert browser is not None
    assert not missing
    steps = {
        prompt["set"]: [group["step"] for group in prompt["groups"]]
        for prompt in browser.prompts
        if prompt["set"].startswith("eval")
    }
    assert steps == {"eval greedy": [*STEPS], "eval hot": [*STEPS]}


@pytest.mark.parametrize("step", [STEPS[0], *(pytest.param(step, marks=pytest.mark.long) for step in STEPS[1:])])
def test_grpo_eval_of_checkpoint_matches_run_metrics(
    step: int, evaluated: Evaluated, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # reward functions are imported from there, as the run has
    assert cli.main(["eval", str(evaluated.folder / "out" / f"checkpoint-{step}"), "--json"]) == 0
    sets = json.loads(capfd.readouterr().out)["sets"]
    assert [each["name"] for each in sets] == [*SETS]
    for each in sets:
        line = evaluated.lines[each["name"]][step]
        assert each["metrics"] == pytest.approx({name: line[name] for name in each["metrics"]}, abs=1e-6)
        assert {f"eval_{each['name']}_{name}" for name in ("pass@1", "pass@2", "pass@4", "avg@4")} == {*each["metrics"]}
        assert (each["num_prompts"], each["num_refused"]) == (SETS[each["name"]], 0)


def test_grpo_eval_of_one_set_with_temperature_0_samples_greedily(
    evaluated: Evaluated, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    checkpoint = evaluated.folder / "out" / "checkpoint-2"
    assert cli.main(["eval", str(checkpoint), "--set", "hot", "--", "--eval_temperature", "0"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("checkpoint-2: hot pass@1 ")
    assert "greedy" not in said
    passes = {name: value for name, value in re.findall(r"(pass@\d)\s+([\d.]+)", said.partition("\n")[2])}
    assert passes["pass@1"] == passes["pass@4"]  # greedy ones are all alike
