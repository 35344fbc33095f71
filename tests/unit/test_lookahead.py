"""What is sampled ahead, and the order of weight syncs, generations and steps: the real trainer over a scripted
engine."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from peft import LoraConfig
from torch.utils.data import BatchSampler
from transformers import AutoTokenizer, TrainerCallback

from grpo import GRPOTrainer
from grpo.checkpoints.prompt_order import GenerationSampler, prompts_of_rows, rows_of_batch
from grpo.engine.messages import Sample
from grpo.rollout.pool import EnginePool
from grpo.seam import ordering
from grpo.weights import delivery
from grpo.weights.trained import TrainedModel
from tests.support.engines import Script, agree
from tests.support.scripted_trainer import make_trainer, of_kind, train, use_scripted_engines


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_batch_match_data_loader_over_epochs(world_size: int) -> None:
    """Also over the end of an epoch. A group of 4 may lie on two ranks."""
    sampler = GenerationSampler(range(20), prompts_per_batch=3, num_generations=4, repeats=2, shuffle=True, seed=5)
    dealt: dict[int, list[list[int]]] = {rank: [] for rank in range(world_size)}
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        for rank in range(world_size):
            batches = BatchSampler(sampler, batch_size=12 // world_size, drop_last=False)
            dealt[rank] += list(BatchSamplerShard(batches, num_processes=world_size, process_index=rank))[::2]
    dataset = [{"prompt": row} for row in range(20)]
    for rank in range(world_size):
        for number, rows in enumerate(dealt[rank]):
            ahead = prompts_of_rows(
                rows_of_batch(number, sampler, rank=rank, world_size=world_size),
                dataset,
                tokenize=lambda prompts: [[prompt, 99] for prompt in prompts],
            )
            assert ahead == [[row, 99] for row in rows]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return use_scripted_engines(monkeypatch)


@pytest.fixture
def story(script: Script, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> list[tuple]:
    """What happened, in order: weight syncs, submissions and collections by their prompts, and optimizer steps."""
    events = script.story
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    monkeypatch.setattr(delivery, "is_due", lambda sync: False)
    submit, collect = EnginePool.submit, EnginePool.collect
    asked: dict[Any, tuple[str, ...]] = {}

    def prompts(requests: Any) -> tuple[str, ...]:
        return tuple(tokenizer.decode(request.token_ids).replace(" ", "") for request in requests)

    def noted_submit(pool: EnginePool, requests: Any, **more: Any) -> Any:
        batch = submit(pool, requests, **more)
        asked[batch] = prompts(requests)
        events.append(("submit", asked[batch]))
        return batch

    def noted_collect(pool: EnginePool, batch: Any, *args: Any) -> Any:
        events.append(("collect", asked[batch]))
        return collect(pool, batch, *args)

    monkeypatch.setattr(EnginePool, "submit", noted_submit)
    monkeypatch.setattr(EnginePool, "collect", noted_collect)
    return events


def test_lookahead_of_one_keeps_order_and_reports_lag(tiny_model: Path, tmp_path: Path, story: list[tuple]) -> None:
    trainer = train(tiny_model, tmp_path, story, generation_lookahead=1)
    first, second, third = of_kind(story, "score")
    assert story == [
        ("sync", 0), ("submit", first), ("collect", first), ("submit", second), ("score", first), ("step", 1),
        ("collect", second), ("sync", 1), ("submit", third), ("score", second), ("step", 2),
        ("collect", third), ("sync", 2), ("score", third), ("step", 3),
    ]  # fmt: skip
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert [line["rollout/policy_lag"] for line in lines] == [0, 1, 1]
    assert [line["rollout/policy_lag_steps"] for line in lines] == [0, 1, 1]
    assert [line["engine/policy_version"] for line in lines] == [0, 0, 1]
    for line in lines:
        assert 0 <= line["sampling/importance_sampling_ratio/clipped_share"] <= 1
        assert line["rollout/wait_s_max"] >= 0
    assert all(0 <= line[name] <= 1 for line in lines[1:] for name in ("rollout/wait_share", "engine/idle_share"))


def test_lookahead_of_three_keeps_order_and_reports_staleness(
    tiny_model: Path, tmp_path: Path, story: list[tuple]
) -> None:
    """A weight sync comes before the wait for the oldest batch, and the next batch behind it; no batch after the
    last step."""
    trainer = train(tiny_model, tmp_path, story, generation_lookahead=3, max_steps=6)
    one, two, three, four, five, six = of_kind(story, "score")
    assert story == [
        ("sync", 0), ("submit", one), ("submit", two), ("submit", three),
        ("collect", one), ("submit", four), ("score", one), ("step", 1),
        ("sync", 1), ("collect", two), ("submit", five), ("score", two), ("step", 2),
        ("sync", 2), ("collect", three), ("submit", six), ("score", three), ("step", 3),
        ("sync", 3), ("collect", four), ("score", four), ("step", 4),
        ("sync", 4), ("collect", five), ("score", five), ("step", 5),
        ("sync", 5), ("collect", six), ("score", six), ("step", 6),
    ]  # fmt: skip
    lines = [line for line in trainer.state.log_history if "reward" in line]
    for name in ("policy_lag", "policy_lag_steps", "staleness_mean", "staleness_max"):
        assert [line[f"rollout/{name}"] for line in lines] == [0, 1, 2, 3, 3, 3], name


def test_evaluate_from_callback_waits_for_batches_in_flight(
    tiny_model: Path, tmp_path: Path, story: list[tuple]
) -> None:
    """It may be of other weights than those of training."""

    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.evaluate()

    trainer = make_trainer(
        tiny_model, tmp_path, story, generation_lookahead=3, max_steps=5, per_device_eval_batch_size=16
    )
    trainer.add_callback(Evaluates())
    try:
        trainer.train()
    finally:
        trainer.close()
    _, two, three, four, _ = of_kind(story, "score")
    (evaluated,) = of_kind(story, "evaluate")
    begins, ends = story.index(("step", 1)), story.index(("evaluate", evaluated))
    assert story[begins + 1 : ends + 1] == [
        ("collect", two), ("collect", three), ("collect", four),
        ("sync", 1), ("submit", evaluated), ("collect", evaluated), ("evaluate", evaluated),
    ]  # fmt: skip


def test_lookahead_by_default_is_on_policy(tiny_model: Path, tmp_path: Path, story: list[tuple]) -> None:
    trainer = train(tiny_model, tmp_path, story, max_steps=2)
    first, second = of_kind(story, "score")
    assert story == [
        ("sync", 0), ("submit", first), ("collect", first), ("score", first), ("step", 1),
        ("sync", 1), ("submit", second), ("collect", second), ("score", second), ("step", 2),
    ]  # fmt: skip
    assert {line["rollout/policy_lag"] for line in trainer.state.log_history if "reward" in line} == {0}


def test_second_train_begins_with_weight_sync(tiny_model: Path, tmp_path: Path, story: list[tuple]) -> None:
    trainer = make_trainer(tiny_model, tmp_path, story, max_steps=1)
    try:
        trainer.train()
        trainer.args.max_steps = 2
        trainer.train()
    finally:
        trainer.close()
    assert of_kind(story, "sync", "step") == [0, 1, 0, 1, 1, 2]


def test_signal_handling_after_failed_training_is_closed(tiny_model: Path, tmp_path: Path, story: list[tuple]) -> None:
    trainer = make_trainer(tiny_model, tmp_path, story)
    trainer.reward_funcs[0] = lambda **kwargs: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert not trainer._parts.run.signals.is_open
    finally:
        trainer.close()


def test_trainer_after_garbage_collection_closes_engines(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple]
) -> None:
    trainer = make_trainer(tiny_model, tmp_path, story, max_steps=1)
    trainer.train()
    (engine,) = script.started
    assert not engine.is_closed
    del trainer
    gc.collect()
    assert engine.is_closed


CASES = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "two_batches_a_step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "two_steps_a_batch": {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 5},
    "iterations": {"num_iterations": 2, "max_steps": 5},
    "epochs": {"num_prompts": 5, "max_steps": 5},  # two batches of two prompts in an epoch
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
    "whole_epochs": {"num_prompts": 5, "max_steps": -1, "num_train_epochs": 2},
}


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_lookahead_keeps_prompt_order_and_wastes_no_batch(
    case: str, ahead: int, tiny_model: Path, tmp_path: Path, story: list[tuple]
) -> None:
    train(tiny_model, tmp_path / "now", story, **CASES[case])
    on_policy = list(story)
    story.clear()
    trainer = train(tiny_model, tmp_path / "ahead", story, generation_lookahead=ahead, **CASES[case])
    for kind in ("score", "evaluate", "step"):
        assert of_kind(story, kind) == of_kind(on_policy, kind)
    submitted, collected = of_kind(story, "submit"), of_kind(story, "collect")
    assert sorted(submitted) == sorted(collected)
    assert [prompts for prompts in collected if prompts in of_kind(story, "score")] == of_kind(story, "score")
    assert sorted(submitted) == sorted(of_kind(story, "score", "evaluate"))
    lags = [line["rollout/policy_lag_steps"] for line in trainer.state.log_history if "reward" in line]
    # Of two batches of a step, the second is sampled and used under the same weights.
    of_one = {"iterations": 2, "two_steps_a_batch": 2, "two_batches_a_step": 0.5}
    of_three = {"iterations": 4, "two_steps_a_batch": 4, "two_batches_a_step": 1.5, "whole_epochs": 3}
    assert max(lags) == (of_one.get(case, 1) if ahead == 1 else of_three.get(case, 2 if len(lags) == 3 else 3))


@pytest.mark.parametrize("ahead", [1, 3])
def test_resume_with_lookahead_repeats_and_loses_no_batch(
    ahead: int, tiny_model: Path, tmp_path: Path, story: list[tuple]
) -> None:
    train(tiny_model, tmp_path / "whole", story, max_steps=5)
    whole = of_kind(story, "score")
    story.clear()
    with pytest.raises(SystemExit) as ended:
        train(tiny_model, tmp_path / "parts", story, max_steps=5, generation_lookahead=ahead, stop_at=2)
    assert ended.value.code == 0
    assert of_kind(story, "score") == whole[:2]
    in_flight = of_kind(story, "submit")[2]
    assert in_flight == whole[2]
    assert in_flight in of_kind(story, "collect")  # for the checkpoint
    (tmp_path / "parts" / "stop").unlink(missing_ok=True)
    train(tiny_model, tmp_path / "parts", story, max_steps=5, generation_lookahead=ahead, resume_from_checkpoint="auto")
    assert of_kind(story, "score") == whole
    assert of_kind(story, "step") == [1, 2, 3, 4, 5]
    assert of_kind(story, "submit").count(in_flight) == 1


def by_policy(script: Script) -> Callable[[Sample, Sequence[int]], Sequence[float]]:
    """Log-probabilities that say which policy has sampled."""

    def logprobs(sample: Sample, tokens: Sequence[int]) -> Sequence[float]:
        synced = [version for kind, version, *_ in script.story if kind == "sync"]
        return [-2.5 - 0.1 * synced[-1]] * len(tokens)

    return logprobs


RESUMED = ("loss", "grad_norm", "reward", "rollout/policy_lag", "rollout/policy_lag_steps", "engine/policy_version")


def run_of(trainer: GRPOTrainer) -> list[list[float]]:
    return [[line[name] for name in RESUMED] for line in trainer.state.log_history if "reward" in line]


@pytest.mark.parametrize("changed", [{}, {"temperature": 0.7}, {"generation_lookahead": 0}], ids=str)
def test_resume_with_batch_ahead_reuses_it_unless_settings_changed(
    changed: dict[str, Any], tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple]
) -> None:
    """Bit by bit; and with others where they are not of the settings that training has now."""
    script.logprobs_of = by_policy(script)
    script.tokens_of = lambda sample, number: [5 + (sample.seed + number) % 7, 6, 7]
    settings: dict[str, Any] = {"max_steps": 5, "generation_lookahead": 1, "learning_rate": 1e-2}
    whole = train(tiny_model, tmp_path / "whole", story, **settings)
    story.clear()
    with pytest.raises(SystemExit):
        train(tiny_model, tmp_path / "parts", story, stop_at=2, **settings)
    (tmp_path / "parts" / "stop").unlink(missing_ok=True)
    submitted = len(of_kind(story, "submit"))
    resumed = train(tiny_model, tmp_path / "parts", story, resume_from_checkpoint="auto", **settings | changed)
    again = of_kind(story, "submit")[submitted:]
    assert len(again) == (3 if changed else 2)
    assert (run_of(resumed) == run_of(whole)) == (not changed)
    if not changed:
        for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_resume_with_weights_in_flight_resamples_no_finished_batch(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple]
) -> None:
    """These engines answer at once: three batches that are whole, each by the policy that was there at its
    submission, and counted as before."""
    script.logprobs_of = by_policy(script)
    settings: dict[str, Any] = {"max_steps": 7, "generation_lookahead": 3, "learning_rate": 1e-2}
    whole = train(tiny_model, tmp_path / "whole", story, **settings)
    story.clear()
    script.samples.clear()
    with pytest.raises(SystemExit):
        train(tiny_model, tmp_path / "parts", story, stop_at=3, **settings)
    (tmp_path / "parts" / "stop").unlink(missing_ok=True)
    resumed = train(tiny_model, tmp_path / "parts", story, resume_from_checkpoint="auto", **settings)
    assert run_of(resumed) == run_of(whole)
    assert max(line[3] for line in run_of(whole)) == 3
    seeds = [sample.seed + number for sample in script.samples for number in range(len(sample.ids))]
    assert len({*seeds}) == len(seeds) == 7 * 8


def test_resume_with_synced_adapters_continues_batches_in_flight(
    tiny_model: Path, tmp_path: Path, script: Script, story: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainedModel, "trial", lambda *args: None)  # of adapters: these engines hold none

    def control(method: str, kwargs: dict[str, Any]) -> Any:
        if method == "take_adapter":
            story.append(("sync", int(kwargs["policy_version"])))
        return agree(method, kwargs)

    script.control, script.logprobs_of = control, by_policy(script)
    settings: dict[str, Any] = {"max_steps": 6, "generation_lookahead": 3, "learning_rate": 1e-2}
    settings |= {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}
    whole = train(tiny_model, tmp_path / "whole", story, **settings)
    story.clear()
    with pytest.raises(SystemExit):
        train(tiny_model, tmp_path / "parts", story, stop_at=2, **settings)
    (tmp_path / "parts" / "stop").unlink(missing_ok=True)
    submitted = of_kind(story, "submit")
    resumed = train(tiny_model, tmp_path / "parts", story, resume_from_checkpoint="auto", **settings)
    assert len(submitted) == 5
    assert len(of_kind(story, "submit")) == 6
    assert run_of(resumed) == run_of(whole)
    assert [line[-3:] for line in run_of(whole)] == [[0, 0, 0], [1, 1, 0], [2, 2, 0], [3, 3, 0], [3, 3, 1], [3, 3, 2]]


def test_lookahead_with_changing_dataset_raises(
    tiny_model: Path, tmp_path: Path, story: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter(range(10, 10**6))
    monkeypatch.setattr(
        ordering,
        "prompts_of_rows",
        lambda *args, **kwargs: [[*ids[:-1], next(reads) % 7] for ids in prompts_of_rows(*args, **kwargs)],  # as long
    )
    with pytest.raises(RuntimeError, match=r"GRPO-611.*generation_lookahead to 0"):
        train(tiny_model, tmp_path, story, generation_lookahead=1)
