"""What the real trainer leaves in its folder, over an engine that answers at once."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo import GRPOTrainer
from grpo.record.completions import sampled_rows
from grpo.record.timeline.records import (
    BACKWARD,
    FORWARD,
    GENERATE,
    OLD_LOGPROBS,
    OPTIMIZER,
    REFERENCE_LOGPROBS,
    SAVE,
    SCORE,
    START,
    SYNC,
    read_timelines,
)
from grpo.rollout.facts import STOPPED
from tests.support.engines import Script
from tests.support.scripted_trainer import make_trainer, use_scripted_engines

LOOSE = 1e9  # a scripted engine computes no probabilities


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return use_scripted_engines(monkeypatch)


@pytest.fixture
def story(script: Script) -> list[tuple]:
    return script.story


def attempts(output_dir: Path) -> list[dict[str, Any]]:
    return json.loads((output_dir / "run.json").read_text())["attempts"]


def test_run_json_records_state_of_each_attempt(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple]
) -> None:
    def made(stop_at: int = 0) -> GRPOTrainer:
        settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "resume_from_checkpoint": "auto"}
        settings |= {"vllm_max_logprob_gap": LOOSE, "hub_token": "secret", "vllm_max_restarts": 0}
        return make_trainer(tiny_model, tmp_path, story, stop_at=stop_at, **settings)

    trainer = made(stop_at=1)
    (entry,) = attempts(tmp_path)
    assert (entry["state"], entry["attempt"], entry["arguments"]["max_steps"]) == ("running", 0, 3)
    with pytest.raises(SystemExit):
        trainer.train()
    failing = made()
    script.asked.clear()
    script.deaths = [("submit", 1)]
    with pytest.raises(Exception, match="killed by signal 9"):
        failing.train()
    failing.close()
    script.deaths = []
    finishing = made()
    finishing.train()
    finishing.close()
    reported = attempts(tmp_path)
    assert [(each["attempt"], each["state"], each["from_step"], each["step"]) for each in reported] == [
        (0, "stopped", 0, 1),
        (1, "failed", 1, 1),
        (2, "finished", 1, 3),
    ]
    assert [each["failure"] is None for each in reported] == [True, False, True]
    assert reported[1]["failure"].keys() == {"node", "rank", "host", "phase", "cause", "kind", "nodes"}
    assert "killed by signal 9" in reported[1]["failure"]["cause"]
    assert (
        reported[0]["topology"]["num_nodes"]
        == reported[0]["topology"]["world_size"]
        == len(reported[0]["topology"]["hosts"])
    )
    assert all(each["ended"] > each["started"] for each in reported)
    assert "secret" not in (tmp_path / "run.json").read_text()


def test_sampled_rows_from_trl_logs_hold_one_group(tiny_model: Path, tmp_path: Path, story: list[tuple]) -> None:
    """Whatever `log_completions` says, and with its own columns; evaluation is kept there, too."""
    trainer = make_trainer(tiny_model, tmp_path, story, max_steps=1, vllm_max_logprob_gap=LOOSE, eval_on_start=True)
    rows: list[dict[str, Any]] = []
    log = trainer.log

    def logging(*args: Any, **kwargs: Any) -> None:
        log(*args, **kwargs)
        weights = trainer.reward_weights.tolist()
        rows.extend(sampled_rows(trainer._logs, trainer._parts.records._facts, num_prompts=1, reward_weights=weights))

    trainer.log = logging  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    assert trainer.log_completions is False
    assert len(rows) in (4, 8)  # a group of 4, and once more with the last log
    (function,) = trainer.reward_func_names
    for row in rows:
        assert row["prompt"].endswith("=")
        assert row["completion"]
        assert row["reward"] == row[f"rewards/{function}"]
    assert sum(row["advantage"] for row in rows) == pytest.approx(0, abs=1e-4)


def test_facts_with_several_eos_tokens_mark_completions_stopped(
    tiny_model: Path, tmp_path: Path, story: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL counts it, whatever the tokenizer's one is."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    settings = json.loads((model / "generation_config.json").read_text())
    ends = [settings["eos_token_id"], *range(5, 20)]  # what a scripted engine samples
    (model / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": ends}))
    trainer = make_trainer(model, tmp_path / "run", story, max_steps=1, vllm_max_logprob_gap=LOOSE)
    assert trainer._local is not None
    facts, noted = trainer._local.facts, list[np.ndarray]()

    def note(end_tokens: Any) -> np.ndarray:
        noted.append(facts(end_tokens))
        return noted[-1]

    monkeypatch.setattr(trainer._local, "facts", note)
    trainer.train()
    trainer.close()
    assert {*np.concatenate(noted)[:, -1].tolist()} == {STOPPED}
    assert {line.get("completions/clipped_ratio", 0.0) for line in trainer.state.log_history} == {0.0}


def test_recorded_run_writes_metrics_timeline_and_completions(
    tiny_model: Path, tmp_path: Path, story: list[tuple]
) -> None:
    """Two attempts: timelines, metrics with their times, samples of completions, a profile."""
    settings: dict[str, Any] = {"vllm_max_logprob_gap": LOOSE, "save_strategy": "steps", "save_steps": 1, "beta": 0.1}
    settings |= {"resume_from_checkpoint": "auto", "log_completions_prompts": 1, "profile_steps": "3"}
    with pytest.raises(SystemExit):
        make_trainer(tiny_model, tmp_path, story, stop_at=1, **settings).train()
    trainer = make_trainer(tiny_model, tmp_path, story, **settings)
    trainer.train()
    trainer.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line and "train_runtime" not in line]
    assert [(line["step"], line["attempt"]) for line in steps] == [(1, 0), (2, 1), (3, 1)]
    assert all([*line][:3] == ["step", "time", "attempt"] for line in lines)
    assert all(
        len(line["by_node"]["rollout/generate_s"]) == len(line["by_node"]["weight_sync/total_s"]) == 1 for line in steps
    )
    assert "by_node" not in lines[-1], "the totals"
    assert steps[0]["completions/length_p10"] == steps[0]["completions/length_p90"] == 3
    assert steps[2]["profile/computation_share"] > 0
    assert (tmp_path / "profile" / "rank0-steps3-3.json.gz").exists()

    (timeline,) = read_timelines(tmp_path)
    assert [(each.attempt, each.ranks) for each in timeline.attempts] == [(0, [0]), (1, [0])]
    assert timeline.unreadable == 0
    for attempt, did in ((0, {0}), (1, {1, 2})):
        spans = [span for span in timeline.spans if span.attempt == attempt]
        for phase in (FORWARD, BACKWARD, OPTIMIZER, SCORE, OLD_LOGPROBS, REFERENCE_LOGPROBS, SYNC, SAVE):
            of_phase = [span for span in spans if span.phase == phase]
            done = {step + 1 for step in did} if phase == SAVE else did
            assert {span.step for span in of_phase} == done, (phase, attempt)
            beside = {"reward reward"} if phase == SCORE else set()  # while the rank itself waited for nothing
            assert {span.lane for span in of_phase} == {"rank 0", *beside}, phase
        own = sorted((span for span in spans if span.lane == "rank 0"), key=lambda span: span.begin)
        assert own[0].phase == START
        for before, after in pairwise(own):
            assert before.end <= after.begin + 1e-5 or before.phase in (START, SAVE), (before, after)
    sampled = [span for span in timeline.spans if span.lane == "engine 0"]
    assert {(span.phase, span.tokens, span.requests) for span in sampled} == {(GENERATE, 24, 8)}
    assert [span.policy_version for span in sampled] == [0, 1, 2]
    assert {usage.device for usage in timeline.usages} >= {"node", "rank 0"}

    tables = [pq.read_table(path).to_pylist() for path in sorted((tmp_path / "completions").glob("step-*.parquet"))]
    assert [{row["step"] for row in rows} for rows in tables] == [{1}, {2}, {3}]
    for rows in tables:
        assert len(rows) == 4
        assert {(row["node"], row["engine"], row["completion_tokens"], row["stop_reason"]) for row in rows} == {
            (0, 0, 3, "length")
        }
        assert [row["policy_version"] for row in rows] == [rows[0]["step"] - 1] * 4
        assert rows[0]["prompt_tokens"] > 0
