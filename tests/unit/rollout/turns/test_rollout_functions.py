"""Rollout functions in the real trainer, over an engine that says what is written down."""

import asyncio
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from grpo import GRPOTrainer
from grpo.faults.limits import CallLimits
from grpo.rollout.turns import batch
from tests.support.engines import Script, ScriptedEngine
from tests.support.speaking_engine import TOKENIZER, Make, calculates, steps_of


def test_a_rollout_function_calls_generate_as_often_as_it_likes(make: Make, script: Script) -> None:
    """As in TRL's examples: token ids in and out, extra fields for the rewards, a mask of what it put in itself."""

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
        _, first, first_logprobs, _ = trainer.vllm_generation.generate(prompts=ids, images=None, num_generations=4)
        hint = TOKENIZER("<t>5<e><a>")["input_ids"]
        said = [prompt + own + hint for prompt, own in zip(ids, first, strict=True)]
        _, second, second_logprobs, _ = trainer.vllm_generation.generate(prompts=said, images=None, num_generations=4)
        return {
            "prompt_ids": ids,
            "completion_ids": [own + hint + more for own, more in zip(first, second, strict=True)],
            "logprobs": [
                [each[0] for each in own] + [0.0] * len(hint) + [each[0] for each in more]
                for own, more in zip(first_logprobs, second_logprobs, strict=True)
            ],
            "env_mask": [
                [1] * len(own) + [0] * len(hint) + [1] * len(more) for own, more in zip(first, second, strict=True)
            ],
            "second": [TOKENIZER.decode(more) for more in second],
        }

    def reward(second: list[str], **more: Any) -> list[float]:
        return [float(each == "5<e>") for each in second]

    first, _ = steps_of(make(calculates, reward, rollout_func=rollout))
    assert first["reward"] == 1.0
    assert first["rollout/turns"] == 2.0
    seeds = [sample.seed for sample in script.samples]
    assert len(set(seeds)) == len(seeds)


def test_a_rollout_function_with_an_agent_loop_of_its_own(make: Make) -> None:
    async def one(row: int, prompt: list[int], trainer: GRPOTrainer) -> tuple[list[int], list[float], list[int]]:
        ids, logprobs, mask = [], [], []
        for number in range(3):
            turn = await trainer.vllm_generation.sample([*prompt, *ids], row=row, turn=number, max_tokens=40)
            ids += turn.token_ids
            logprobs += turn.logprobs
            mask += [1] * len(turn.token_ids)
            if "<c>" not in TOKENIZER.decode(turn.token_ids):
                break
            answer = TOKENIZER("<t>7<e><a>")["input_ids"]
            ids, logprobs, mask = ids + answer, logprobs + [0.0] * len(answer), mask + [0] * len(answer)
        return ids, logprobs, mask

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=False
        )

        async def everything() -> list[Any]:
            return await asyncio.gather(*(one(row, ids, trainer) for row, ids in enumerate(prompt_ids)))

        ids, logprobs, mask = zip(*asyncio.run(everything()), strict=True)
        return {"prompt_ids": prompt_ids, "completion_ids": [*ids], "logprobs": [*logprobs], "env_mask": [*mask]}

    def sevens(completions: list[Any], **more: Any) -> list[float]:
        return [float("7<e>" in said[0]["content"] or "<t>7" in said[0]["content"]) for said in completions]

    first, _ = steps_of(make(calculates, sevens, rollout_func=rollout))
    assert first["rollout/turns"] == 1.5


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([], "rollout_func returned list: it has to return a dict"),
        ({"prompt_ids": [[1]] * 8}, "rollout_func returned no 'completion_ids', but 'prompt_ids'"),
        (
            {"prompt_ids": [[1]] * 8, "completion_ids": [[1]], "logprobs": None},
            "returned 1 completion_ids for 8 prompts",
        ),
        ({"prompt_ids": [[1]] * 8, "completion_ids": [[]] * 8, "logprobs": None}, "returned no tokens for row 0"),
        (
            {"prompt_ids": [[1]] * 8, "completion_ids": [[1, 2]] * 8, "logprobs": [[0.0]] * 8},
            r"returned logprobs of \[1, 1.*for completion_ids of \[2, 2",
        ),
    ],
)
def test_what_a_rollout_function_gives_is_looked_at(make: Make, output: Any, message: str) -> None:
    trainer = make(calculates, rollout_func=lambda prompts, trainer: output)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_rollout_function_that_raises_and_one_that_hangs(make: Make) -> None:
    def raises(prompts: Any, trainer: Any) -> Any:
        raise ZeroDivisionError("in an agent")

    with pytest.raises(ZeroDivisionError, match="in an agent"):
        make(calculates, rollout_func=raises).train()
    with pytest.raises(RuntimeError, match="rollout_func ended by SystemExit: 0"):
        make(calculates, rollout_func=lambda prompts, trainer: sys.exit(0)).train()
    release = threading.Event()
    config = {"rollout_timeout": 1.0, "tool_timeout": 0.5}
    with pytest.raises(TimeoutError, match=r"GRPO-608.* the rollout's own code"):
        make(calculates, rollout_func=lambda prompts, trainer: release.wait(), config=config).train()
    release.set()


def test_time_without_an_engine_is_none_of_the_rollouts(
    make: Make, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine dies, and the next one takes longer to start than a batch may."""
    passed, limits = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(batch, "time", clock)
    ready, around = ScriptedEngine.wait_ready, CallLimits.around

    def late(self: ScriptedEngine, *args: Any) -> Any:
        passed[0] += 4000.0 * (len(script.started) > 1)
        return ready(self, *args)

    def noted(self: CallLimits, phase: str, timeout_s: float, cause: str) -> Any:
        limits.append((phase, timeout_s))
        return around(self, phase, timeout_s, cause)

    monkeypatch.setattr(ScriptedEngine, "wait_ready", late)
    monkeypatch.setattr(CallLimits, "around", noted)

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        output = generates([[5]] * 8)(prompts, trainer)
        threading.Event().wait(3 * batch.POLL_S)  # until somebody has looked at the time
        return output

    trainer = make(calculates, nothing, rollout_func=rollout)
    script.deaths.append(("submit", 1))
    steps_of(trainer)
    assert passed[0] > trainer.args.rollout_timeout
    while_it_runs = [timeout_s for phase, timeout_s in limits if phase == "rollout"]
    assert len(while_it_runs) == 3  # two batches, and what was left of the first
    assert all(abs(timeout_s - trainer.args.rollout_timeout - 60.0) < 30.0 for timeout_s in while_it_runs)


def test_nobody_samples_behind_the_batch(make: Make) -> None:
    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        return {"prompt_ids": [[5]] * 8, "completion_ids": [[6, 1]] * 8, "logprobs": [[-1.0, -1.0]] * 8}

    trainer = make(calculates, lambda completions, **more: [0.0] * len(completions), rollout_func=rollout)
    trainer.train()
    with pytest.raises(RuntimeError, match="generate is for the rollout function, while it runs"):
        trainer.vllm_generation.generate(prompts=[[5]], images=None, num_generations=1)
    with pytest.raises(RuntimeError, match="sample is for rollout functions, while one runs"):
        asyncio.run(trainer.vllm_generation.sample([5], row=0, turn=0))


def expect_one_left_out(make: Make, rollout: Any) -> None:
    """Of the eight rows, in both steps: no reward function is shown it."""
    shown: list[int] = []

    def reward(completions: list[Any], **more: Any) -> list[float]:
        shown.append(len(completions))
        return [0.0] * len(completions)

    first, _ = steps_of(make(lambda text, seed: "17<e>", reward, rollout_func=rollout))
    assert first["rollout/refused"] == 1
    assert shown == [7, 7]


def test_a_prompt_that_no_engine_takes_is_left_out(make: Make) -> None:
    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [[5] * (200 if row == 3 else 5) for row in range(8)]
        _, said, logprobs, _ = trainer.vllm_generation.generate(prompts=ids, images=None, num_generations=4)
        return {"prompt_ids": ids, "completion_ids": said, "logprobs": [[each[0] for each in row] for row in logprobs]}

    expect_one_left_out(make, rollout)


def test_a_prompt_that_sample_is_refused_is_left_out_too(make: Make) -> None:
    """Its function has nothing to give, and need not make anything up."""

    async def one(row: int, trainer: GRPOTrainer) -> Any:
        turn = await trainer.vllm_generation.sample([5] * (200 if row == 3 else 5), row=row, turn=0)
        assert (turn.refusal is not None) == (row == 3)
        return turn

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        async def everything() -> list[Any]:
            return await asyncio.gather(*(one(row, trainer) for row in range(8)))

        turns = asyncio.run(everything())
        return {
            "prompt_ids": [[5]] * 8,
            "completion_ids": [turn.token_ids for turn in turns],
            "logprobs": [turn.logprobs for turn in turns],
            "env_mask": [[1] * len(turn.token_ids) for turn in turns],
        }

    expect_one_left_out(make, rollout)


def nothing(prompts: list[Any], **more: Any) -> list[float]:
    return [0.0] * len(prompts)


def generates(*calls: list[list[int]]) -> Any:
    """A rollout function that asks for these prompts one after the other, and gives the first answers."""

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        answers = [trainer.vllm_generation.generate(prompts=ids, images=None, num_generations=4) for ids in calls]
        said, logprobs = answers[0][1], [[each[0] for each in row] for row in answers[0][2]]
        return {"prompt_ids": [[5]] * 8, "completion_ids": said, "logprobs": logprobs}

    return rollout


def test_a_later_turn_of_generate_that_is_refused_leaves_its_row_out(make: Make) -> None:
    """What stands for it there is no token that the model has said."""
    rollout = generates([[5]] * 8, [[5] * (200 if row == 3 else 5) for row in range(8)])
    first, _ = steps_of(make(calculates, nothing, rollout_func=rollout))
    assert first["rollout/refused"] == 1


def test_generate_for_some_rows_says_nothing_of_others(make: Make) -> None:
    rollout = generates([[5]] * 8, [[6]] * 3)
    first, _ = steps_of(make(calculates, nothing, rollout_func=rollout))
    assert first["rollout/turns"] == 11 / 8
    with pytest.raises(ValueError, match="generate was given 3 prompts, and the batch has 8 rows"):
        make(calculates, rollout_func=generates([[5]] * 8, [[6] * 200] * 3)).train()
