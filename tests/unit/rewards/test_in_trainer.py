"""Rewards in the real trainer: what TRL gives them, when they begin, and that curves stay what they are."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trl
from datasets import Dataset
from transformers import TrainerCallback

from grpo import GRPOTrainer, scores_each
from grpo.rewards.scoring import Scoring
from tests.support.made_up_tools import times
from tests.support.speaking_engine import Make, calculates, right, steps_of

PATIENCE_S = 60.0
REPLIES = ("17", "4", "250", "12", "9")


def speaks(text: str, seed: int) -> str:
    return REPLIES[seed % len(REPLIES)] + "<e>"


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(said[-1]["content"])) for said in completions]


async def length_later(completions: list[Any], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return length(completions)


def declared(unit: Any, func: Callable[..., Any]) -> Any:
    async def later(**arguments: Any) -> Any:
        return await func(**arguments)

    def now(**arguments: Any) -> Any:
        return func(**arguments)

    chosen = later if asyncio.iscoroutinefunction(func) else now
    chosen.__name__ = func.__name__
    return scores_each(unit)(chosen)


def curve(trainer: GRPOTrainer) -> list[tuple[float, ...]]:
    names = "reward", "reward_std", "loss", "grad_norm", "completions/mean_length"
    return [tuple(step[name] for name in names) for step in steps_of(trainer)]


def test_curves_with_any_reward_mode_are_equal(make: Make) -> None:
    """Declared ones bring single turns the way of episodes: their samples are the same as well."""
    plain = curve(make(speaks, [length, length_later], config={"overlap_rewards": False}))
    assert len({step[0] for step in plain}) == 2
    assert curve(make(speaks, [length, length_later])) == plain
    for unit in ("completion", "group"):
        assert curve(make(speaks, [declared(unit, length), declared(unit, length_later)])) == plain


def test_lookahead_with_declared_rewards_keeps_curve(make: Make) -> None:
    ahead = {"generation_lookahead": 1}
    assert curve(make(speaks, declared("completion", length), config=ahead)) == curve(
        make(speaks, length, config=ahead)
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "event loop"])
def test_reward_ahead_scores_next_batch_before_step_ends(make: Make, is_async: bool) -> None:
    scored, found = threading.Semaphore(0), Counter[int]()

    def score(completions: list[Any], trainer_state: Any, log_metric: Any, **_: Any) -> list[float]:
        found[trainer_state.global_step] += len(completions)
        log_metric("scored", 1.0)
        scored.release(len(completions))
        return length(completions)

    async def score_later(**columns: Any) -> list[float]:
        return score(**columns)

    class Waits(TrainerCallback):
        """In the main thread, before the step's end: for all rewards of the batch that follows."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step < state.max_steps:
                mine = 8 if state.global_step == 1 else 0
                assert all(scored.acquire(timeout=PATIENCE_S) for _ in range(mine + 8))

    func, config = score_later if is_async else score, {"generation_lookahead": 1, "max_steps": 4}
    plain = curve(make(speaks, func, config=config))
    assert found == {step: 8 for step in range(4)}
    found.clear()
    while scored.acquire(blocking=False):
        pass
    ahead = make(speaks, scores_each("completion", ahead=True)(func), config=config, callbacks=[Waits()])
    assert curve(ahead) == plain
    assert found == {step: 8 for step in range(4)}, "each once, with the state of the step that trains on it"


def test_reward_ahead_with_error_raises_in_step_training_on_it(make: Make) -> None:
    @scores_each("completion", ahead=True)
    def fails(trainer_state: Any, completions: list[Any], **_: Any) -> list[float]:
        if trainer_state.global_step == 2:
            raise ValueError("no judge")
        return length(completions)

    steps: list[int] = []

    class Notes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            steps.append(state.global_step)

    trainer = make(speaks, fails, config={"generation_lookahead": 1, "max_steps": 4}, callbacks=[Notes()])
    with pytest.raises(ValueError, match="no judge"):
        trainer.train()
    assert steps == [1, 2]


def test_reward_arguments_match_trl(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[dict[str, Any]] = []
    trls: list[dict[str, Any]] = []

    def notes(**arguments: Any) -> list[float]:
        ours.append(arguments)
        return [0.0] * len(arguments["prompts"])

    def notes_trls(**arguments: Any) -> list[float]:
        trls.append(arguments)
        return [0.0] * len(arguments["prompts"])

    score = trl.GRPOTrainer._calculate_rewards

    def twice(trainer: Any, *args: Any) -> Any:
        stand_ins, trainer.reward_funcs = trainer.reward_funcs, [notes_trls]
        score(trainer, *args)
        trainer.reward_funcs = stand_ins
        return score(trainer, *args)

    monkeypatch.setattr(trl.GRPOTrainer, "_calculate_rewards", twice)
    for overlaps in (True, False):
        make(speaks, notes, config={"max_steps": 1, "overlap_rewards": overlaps}).train()
    for own, given in zip(ours, trls, strict=True):
        assert own.keys() == given.keys()
        logs = {"log_extra", "log_metric"}
        assert {name: own[name] for name in own.keys() - logs} == {name: given[name] for name in given.keys() - logs}


def test_rewards_run_during_logprob_computation(make: Make) -> None:
    computing = threading.Event()

    def waits(completions: list[Any], **_: Any) -> list[float]:
        assert computing.wait(PATIENCE_S)
        return [1.0] * len(completions)

    trainer = make(speaks, waits, config={"max_steps": 1})
    compute = trainer._get_per_token_logps_and_entropies

    def computes(*args: Any, **kwargs: Any) -> Any:
        computing.set()
        return compute(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = computes  # type: ignore[method-assign]
    (step,) = steps_of(trainer)
    assert step["reward"] == 1.0


@pytest.mark.parametrize("unit", ["completion", "group"])
def test_declared_rewards_start_during_sampling(make: Make, unit: str) -> None:
    scored, asked = threading.Event(), []

    def holds_the_last_back(text: str, seed: int) -> str:
        asked.append(seed)
        if len(asked) == 8:
            assert scored.wait(PATIENCE_S)
        return speaks(text, seed)

    def notes(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        scored.set()
        return length(completions)

    trainer = make(holds_the_last_back, declared(unit, notes), config={"max_steps": 1})
    assert len(steps_of(trainer)) == 1


def test_declared_rewards_of_tool_episodes_keep_curve(make: Make) -> None:
    """One that calls a tool has not ended with its first turn."""
    tables = []
    for kind in (right, declared("completion", right), declared("group", right)):
        trainer = make(calculates, kind, tools=[times])
        tables.append(curve(trainer))
    assert tables[0] == tables[1] == tables[2]


def test_declared_rewards_of_tool_episodes_score_each_completion_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be scored twice, and nobody would notice."""
    calls: list[int] = []

    def counts(completions: list[Any], **_: Any) -> list[float]:
        calls.append(len(completions))
        return length(completions)

    start, early = Scoring.start, []

    def noted(scoring: Scoring, *args: Any, **kwargs: Any) -> None:
        early.append({*scoring._arrived})
        start(scoring, *args, **kwargs)

    monkeypatch.setattr(Scoring, "start", noted)
    make(calculates, declared("completion", counts), tools=[times]).train()
    assert early == [{*range(8)}] * 2
    assert sum(calls) == 16


def test_rewards_with_rollout_func_receive_its_fields(make: Make) -> None:
    def rolls(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [[5, 6] for _ in prompts]
        logprobs = [[-1.0, -1.0] for _ in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": logprobs, "won": [*range(len(prompts))], "at": 3}

    def sees(won: list[int], at: list[int], **_: Any) -> list[float]:
        assert at == [3] * len(won)
        return [float(value) for value in won]

    for reward in (sees, declared("completion", sees)):
        (first, _) = steps_of(make(speaks, reward, rollout_func=rolls))
        assert first["reward"] == 3.5


def test_reward_funcs_changed_after_init_are_used(make: Make) -> None:
    trainer = make(speaks, length, config={"max_steps": 1})
    trainer.reward_funcs[0] = lambda completions, **_: [3.0] * len(completions)
    (step,) = steps_of(trainer)
    assert step["reward"] == 3.0


def test_rewards_with_changed_completions_score_new_ones(make: Make) -> None:
    trainer = make(speaks, length, config={"max_steps": 1})
    score = trainer._calculate_rewards

    def shorter(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        return score(inputs, prompts, [[{"role": "assistant", "content": "x"}] for _ in completions], ids)

    trainer._calculate_rewards = shorter  # type: ignore[method-assign]
    (step,) = steps_of(trainer)
    assert step["reward"] == 1.0


def test_rewards_with_changed_columns_use_new_values(make: Make) -> None:
    """And what the function keeps for its thread is there in the next batch."""
    threads: list[int] = []

    def bonus(bonus: list[float], **_: Any) -> list[float]:
        threads.append(threading.get_ident())
        return bonus

    rows = [{"prompt": [{"role": "user", "content": f"{row}*2"}], "bonus": 1.0} for row in range(8)]
    trainer = make(speaks, bonus, train_dataset=Dataset.from_list(rows))
    score = trainer._calculate_rewards

    def with_another(inputs: Any, *rest: Any) -> Any:
        return score([{**row, "bonus": 5.0} for row in inputs], *rest)

    trainer._calculate_rewards = with_another  # type: ignore[method-assign]
    assert [step["reward"] for step in steps_of(trainer)] == [5.0, 5.0]
    assert len({*threads}) == 1
    assert threading.get_ident() not in threads


def test_generate_without_scoring_returns_completions(make: Make) -> None:
    trainer = make(calculates, tools=[times])
    trainer.train()
    trainer.model.train()
    rows = [{"role": "user", "content": "12*34"}]
    completions = trainer._generate([[dict(row) for row in rows] for _ in range(8)])[3]
    assert {len(said) for said in completions} == {1, 3}  # with a call and its answer, and without
