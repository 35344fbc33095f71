"""Engines that die and come back: the real trainer over scripted engines, whose samples follow from their seeds."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, TrainerCallback

from grpo import GRPOTrainer
from grpo.engine import supervisor
from grpo.engine.messages import EngineSpec
from grpo.faults.failure import StepFailed
from grpo.record.timeline.records import RESTART, read_timelines
from grpo.weights.shm import ShmTransport
from grpo.weights.sync import TRANSPORTS
from tests.support.engines import Script, ScriptedEngine
from tests.support.scripted_trainer import make_trainer, of_kind, use_scripted_engines

LOOSE = 1e9  # a scripted engine computes no probabilities


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return use_scripted_engines(monkeypatch)


@pytest.fixture
def story(script: Script) -> list[tuple]:
    return script.story


class Deaths(TrainerCallback):
    """The engine dies at the end of a step, while nobody asks anything of it."""

    def __init__(self, script: Script, step: int) -> None:
        self.script, self.step = script, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.script.started[-1].die()


def trained(
    tiny_model: Path,
    output_dir: Path,
    script: Script,
    *deaths: tuple[str, int],
    idle_after: int = 0,
    **settings: Any,
) -> GRPOTrainer:
    script.deaths = [*deaths]
    for seen in (script.asked, script.started, script.story):
        seen.clear()
    settings = {"vllm_max_logprob_gap": LOOSE, "max_steps": 4, **settings}
    trainer = make_trainer(tiny_model, output_dir, script.story, **settings)
    trainer.add_callback(Deaths(script, idle_after))
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Any]:
    """What the run does without deaths, by its lookahead; made by the first test that asks."""
    return {}


def weights(trainer: GRPOTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def state_of(output_dir: Path) -> dict:
    return json.loads((output_dir / "run_state.json").read_text())


DEATHS: dict[str, dict[str, Any]] = {
    "generate": {"deaths": [("submit", 5)]},
    "sync": {"deaths": [("update_weights", 3)]},
    "end of a weight sync": {"deaths": [("finish_weight_update", 2)]},
    "verification": {"deaths": [("prompt_logprobs", 2)]},
    "weight sync group": {"deaths": [("init_weight_transfer_engine", 1)]},
    "idle": {"deaths": [], "idle_after": 2},
    "a start that fails once": {"deaths": [("submit", 5), ("wait_ready", 2)]},
    "three of them": {"deaths": [("submit", 3), ("update_weights", 4), ("submit", 9)]},
}


@pytest.mark.parametrize(
    ("where", "ahead"),
    [*((where, 0) for where in DEATHS), *((where, 3) for where in DEATHS if where != "three of them")],
)
def test_run_after_engine_death_matches_undisturbed_run(
    where: str,
    ahead: int,
    tiny_model: Path,
    tmp_path: Path,
    script: Script,
    story: list[tuple],
    undisturbed: dict[int, Any],
) -> None:
    """Several batches ahead, too. There an engine that dies behind the last weight sync does not come back."""
    if ahead not in undisturbed:
        whole = weights(trained(tiny_model, tmp_path / "whole", script, generation_lookahead=ahead))
        undisturbed[ahead] = (of_kind(story, "score", "step"), whole)
        assert len(script.started) == 1
    case = dict(DEATHS[where])
    num_deaths = len(case["deaths"]) or 1
    trainer = trained(tiny_model, tmp_path / "hit", script, *case.pop("deaths"), **case, generation_lookahead=ahead)
    assert of_kind(story, "score", "step") == undisturbed[ahead][0]
    assert torch.equal(weights(trainer), undisturbed[ahead][1])
    assert len(script.started) == 1 + num_deaths
    lines = [line for line in trainer.state.log_history if "reward" in line]
    failed_starts = sum(what == "wait_ready" for what, _ in script.deaths)
    assert lines[-1]["engine/restarts"] == num_deaths - failed_starts
    assert lines[-1]["engine/restart_s"] >= 0
    assert lines[-1]["weight_sync/repeats"] == (
        where in ("sync", "end of a weight sync", "verification", "three of them")
    )
    reissued = sum(line["engine/requests_reissued"] for line in lines)
    assert (reissued > 0) == ("submit" in str(script.deaths)), reissued
    (timeline,) = read_timelines(tmp_path / "hit")
    back = [span for span in timeline.spans if span.phase == RESTART]
    assert len(back) == num_deaths - failed_starts
    assert {span.lane for span in back} == {"engine 0"}
    state = state_of(tmp_path / "hit")
    assert (state["state"], state["step"]) == ("finished", 4)
    assert len(state["restarts"]) == num_deaths - failed_starts
    assert "engine 0 of node 0" in state["restarts"][0]
    assert state["restarts"][0].endswith("[GRPO-407]")
    assert "was killed by signal 9" in state["restarts"][0]


def test_engine_restart_resamples_lost_prompts_with_new_policy(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple]
) -> None:
    trained(tiny_model, tmp_path / "whole", script, generation_lookahead=1)
    scored = of_kind(story, "score", "step")
    # Four prompts a step, two of them in a chunk: of the second batch one prompt is answered, the other one is lost.
    trainer = trained(tiny_model, tmp_path / "hit", script, ("submit", 4), generation_lookahead=1)
    assert of_kind(story, "score", "step") == scored
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert [line["rollout/policy_lag"] for line in lines] == [0, 0.5, 1, 1]
    assert [line["rollout/policy_lag_steps"] for line in lines] == [0, 0.5, 1, 1]
    assert lines[1]["engine/requests_reissued"] == 4


def test_resume_after_engine_failure_without_restarts_loses_no_step(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple]
) -> None:
    undisturbed = trained(tiny_model, tmp_path / "whole", script)
    scored = of_kind(story, "score")
    with pytest.raises(StepFailed, match="was killed by signal 9"):
        trained(tiny_model, tmp_path / "hit", script, ("submit", 5), vllm_max_restarts=0)
    state = state_of(tmp_path / "hit")
    assert (state["state"], state["step"], state["kind"]) == ("failed", 2, "engine")
    assert state["checkpoint"].endswith("checkpoint-2")
    assert of_kind(story, "step") == [1, 2]
    trainer = trained(tiny_model, tmp_path / "hit", script, resume_from_checkpoint="auto")
    assert of_kind(story, "step") == [3, 4]
    assert of_kind(story, "score") == scored[2:]
    assert torch.equal(weights(trainer), weights(undisturbed))


def test_sync_group_of_dead_engine_closes_before_restart(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold buffers on the engine's GPU."""

    class Transport(ShmTransport):
        def open(self, *args: Any) -> None:
            super().open(*args)
            story.append(("group", "opens"))

        def abort(self) -> None:
            story.append(("group", "is closed"))

    def start(spec: EngineSpec, **more: Any) -> ScriptedEngine:
        story.append(("engine", "starts"))
        return script.start(spec, **more)

    monkeypatch.setitem(TRANSPORTS, "shm", Transport)
    monkeypatch.setattr(GRPOTrainer, "start_engine", staticmethod(start))
    trained(tiny_model, tmp_path, script, idle_after=2)
    events = [event for event in story if event[0] in ("engine", "group", "sync")]
    again = events.index(("group", "is closed"))
    assert events[again : again + 4] == [
        ("group", "is closed"), ("engine", "starts"), ("group", "opens"), ("sync", 2)
    ]  # fmt: skip
    assert events[:3] == [("engine", "starts"), ("group", "opens"), ("sync", 0)]


def test_restart_limit_counts_restarts_within_one_hour(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    with pytest.raises(StepFailed, match=r"1 times in an hour .*\[GRPO-408\]: EngineDied: engine 0 of node 0"):
        trained(tiny_model, tmp_path, script, ("submit", 3), ("update_weights", 3), vllm_max_restarts=1)
    assert state_of(tmp_path)["checkpoint"].endswith("checkpoint-1")
    limit = supervisor.RestartLimit(2)
    assert [limit.allows(now) for now in (0.0, 10.0, 20.0, 3611.0, 3650.0)] == [True, True, False, True, True]


def test_train_after_close_raises(tiny_model: Path, tmp_path: Path, story: list[tuple]) -> None:
    trainer = make_trainer(tiny_model, tmp_path / "run", story, vllm_max_logprob_gap=LOOSE, max_steps=1)
    trainer.close()
    with pytest.raises(RuntimeError, match="the engines of this trainer were closed: make a new trainer"):
        trainer.train()
    trainer.close()


def test_engine_start_failure_closes_started_engines(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(spec: EngineSpec, **more: Any) -> ScriptedEngine:
        if len(script.started) == 1:
            raise OSError("no space for its log")
        return script.start(spec, **more)

    monkeypatch.setattr(GRPOTrainer, "start_engine", staticmethod(start))
    with pytest.raises(Exception, match="no space for its log"):
        make_trainer(tiny_model, tmp_path / "run", story, vllm_engines_per_node=2)
    assert [engine.is_closed for engine in script.started] == [True]


def test_engine_restart_after_two_failed_starts_ends_job(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    with pytest.raises(StepFailed, match=r"2 times \[GRPO-409\]: EngineDied: engine 0 of node 0"):
        trained(tiny_model, tmp_path, script, ("submit", 3), ("wait_ready", 2), ("wait_ready", 3))
    assert state_of(tmp_path)["checkpoint"].endswith("checkpoint-1")
    assert len(script.started) == 3


def test_engine_dying_of_every_request_ends_job(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    script.dies_of = lambda sample: script.asked["submit"] > 2
    with pytest.raises(StepFailed, match=r"died again .* answered before: rows \[.*GRPO-410.*signal 9"):
        trained(tiny_model, tmp_path, script)
    state = state_of(tmp_path)
    assert state["step"] == 1
    assert state["checkpoint"].endswith("checkpoint-1")


def test_prompts_refused_by_engines_are_left_out_of_training(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No function sees them, they have no reward and no part in the loss, and the rest of their batch trains."""
    batches: list[torch.Tensor] = []
    score = GRPOTrainer._generate_and_score_completions

    def scored(*args: Any) -> dict[str, Any]:
        batch = score(*args)
        batches.append(batch["completion_mask"].any(dim=1))
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", scored)
    long = "1+" * 40 + "1="
    settings = {"max_steps": 2, "vllm_max_model_length": 200}
    script.max_model_len = 64
    trainer = trained(tiny_model, tmp_path, script, prompts=[long, *(f"{n}+{n}=" for n in range(10, 13))], **settings)
    assert len(of_kind(story, "score")) == 2
    assert not any(long in prompts for prompts in of_kind(story, "score"))
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert sorted(line["rollout/refused"] for line in lines) == [0, 4]
    assert sorted((~trained_on).sum().item() for trained_on in batches) == [0, 4]
    for name in ("reward", "loss", "grad_norm", "rewards/reward/mean"):
        assert all(math.isfinite(line[name]) for line in lines), name
    assert {line["sampling/sampling_logp_difference/max"] < 6 for line in lines} == {True}  # of what was sampled alone
    (tmp_path / "few").mkdir()
    with pytest.raises(StepFailed, match=r"vllm_max_refused \(3\).* 8 completions .*GRPO-412"):
        trained(tiny_model, tmp_path / "few", script, prompts=[long] * 4, vllm_max_refused=3, **settings)
    assert state_of(tmp_path / "few")["kind"] == "user"


def test_prompt_killing_engines_is_left_out_of_training(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple]
) -> None:
    """In two epochs: in the second one it is known. Deaths in the search are none of the engine's."""
    poison = "666+666="
    length = len(AutoTokenizer.from_pretrained(tiny_model)(poison)["input_ids"])
    script.dies_of = lambda sample: len(sample.token_ids) == length
    prompts = [poison, *(f"{n}+{n}=" for n in range(10, 13))]
    trainer = trained(tiny_model, tmp_path, script, prompts=prompts, vllm_max_restarts=2)
    assert len(of_kind(story, "score")) == 4
    assert not any(poison in seen for seen in of_kind(story, "score"))
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert sorted(line["rollout/refused"] for line in lines) == [0, 0, 4, 4]
    assert lines[-1]["engine/restarts"] == len(script.started) - 1 > 2
    assert all(math.isfinite(line["loss"]) for line in lines)
    (tmp_path / "few").mkdir()
    with pytest.raises(StepFailed, match=r"vllm_max_refused \(3\).* 4 completions .*GRPO-412.*GRPO-416.*signal 9"):
        trained(tiny_model, tmp_path / "few", script, prompts=prompts, vllm_max_refused=3)


def test_engine_death_after_stop_request_exits_with_zero(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    """The scheduler's signal goes to all processes of a job."""
    with pytest.raises(SystemExit) as ended:
        trained(tiny_model, tmp_path, script, ("submit", 5), stop_at=1, gradient_accumulation_steps=1, num_iterations=1)
    assert ended.value.code == 0
