"""Episodes that go on while the real trainer trains, over an engine that says what is written down."""

import asyncio
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

import grpo
from grpo.faults.failure import JobFailed
from tests.support.engines import Script
from tests.support.made_up_agents import calculator
from tests.support.made_up_tools import Guessing, halves, plus, times
from tests.support.speaking_engine import Make, calculates, steps_of

DEADLINE_S = 60.0
STEPS = 4
STILL = {"learning_rate": 0.0, "max_steps": STEPS}
COLUMNS = ("reward", "reward_std", "completions/mean_length", "tools/call_frequency", "tools/failure_frequency")
GUESSES = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": f"{n}"}] for n in range(8)], "number": [*range(8)]}
)


@grpo.in_threads
def times_in_threads(a: int, b: int) -> int:
    """The product.

    Args:
        a: the one number
        b: the other
    """
    return a * b


times_in_threads.__name__ = "times"


def seen_of(trainer: Any) -> list[list[Any]]:
    """Of each batch of training, filled while it trains: prompts and completions."""
    seen: list[list[Any]] = []
    make_batch = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        made = make_batch(inputs)
        if trainer.model.training:
            seen.append([made[name].tolist() for name in ("prompt_ids", "completion_ids", "tool_mask") if name in made])
        return made

    trainer._generate_and_score_completions = noted
    return seen


def figures(steps: list[dict[str, float]]) -> list[list[float]]:
    return [[step[name] for name in COLUMNS] for step in steps]


@pytest.mark.parametrize(("ahead", "in_threads"), [(1, False), (3, True)], ids=["1, asynchronous", "3, declared"])
def test_lookahead_with_fixed_weights_matches_no_lookahead(
    ahead: int, in_threads: bool, make: Make, script: Script
) -> None:
    async def awaited(a: int, b: int) -> int:
        """The product.

        Args:
            a: the one number
            b: the other
        """
        return await plus(a * b, 0)

    awaited.__name__ = "times"
    found = []
    for lookahead in (0, ahead):
        script.samples.clear()
        tool = times_in_threads if in_threads else awaited
        trainer = make(calculates, tools=[tool], config={**STILL, "generation_lookahead": lookahead})
        seen = seen_of(trainer)
        steps = steps_of(trainer)
        found.append((figures(steps), seen, Counter((each.seed, each.token_ids.tobytes()) for each in script.samples)))
        lags = [step["rollout/policy_lag"] for step in steps]
        assert max(lags) == lookahead
        staleness = [step["rollout/staleness_mean"] for step in steps]
        assert all(0 <= age <= lag for age, lag in zip(staleness, lags, strict=True)), (staleness, lags)
    assert found[0] == found[1]
    assert len(found[0][1]) == STEPS


def test_lookahead_runs_tools_during_training_of_earlier_batch(make: Make) -> None:
    called = threading.Semaphore(0)

    @grpo.in_threads
    def noted(a: int, b: int) -> int:
        """The product.

        Args:
            a: the one number
            b: the other
        """
        called.release()
        return a * b

    noted.__name__ = "times"

    def always(text: str, seed: int) -> str:
        return calculates(text, 1)

    class Waits(TrainerCallback):
        """In the main thread, before the step's end: for all calls of the batch that follows."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step < state.max_steps:
                assert all(called.acquire(timeout=DEADLINE_S) for _ in range(8))

    trainer = make(always, tools=[noted], callbacks=[Waits()], config={**STILL, "generation_lookahead": 1})
    first = trainer._generate_and_score_completions

    def drained(inputs: Any) -> Any:
        made = first(inputs)
        if trainer.state.global_step == 0:  # those of the first batch, which nothing was sampled before
            assert all(called.acquire(timeout=DEADLINE_S) for _ in range(8))
        return made

    trainer._generate_and_score_completions = drained  # type: ignore[method-assign]
    assert [step["reward"] for step in steps_of(trainer)] == [1.0] * STEPS


@grpo.in_threads
class Counted(Guessing):
    """Guess a number; notes who uses it."""

    alive: "list[Counted]" = []  # noqa: RUF012  of one test

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.alive.append(self)

    def reset(self, number: int = 5, **columns: Any) -> str:
        self.threads.add(threading.get_ident())
        return super().reset(number, **columns)


@pytest.mark.parametrize("ahead", [1, 2])
def test_lookahead_environments_are_reset_once_for_each_row(ahead: int, make: Make) -> None:
    found = []
    for lookahead in (0, ahead):
        Counted.alive = []
        trainer = make(
            halves,
            None,
            environment_factory=Counted,
            train_dataset=GUESSES,
            config={**STILL, "generation_lookahead": lookahead, "max_completion_length": 200}
            | {"vllm_max_model_length": 300},
        )
        seen = seen_of(trainer)
        found.append(([step["reward"] for step in steps_of(trainer)], seen))
        assert sum(each.resets for each in Counted.alive) == STEPS * 8
        assert all(len(each.threads) == 1 for each in Counted.alive if each.resets)
        assert len(Counted.alive) <= 8 * (lookahead + 1) + 1  # one is TRL's, to read the tools
    assert found[0] == found[1]
    assert min(found[0][0]) > 0


@grpo.in_threads
class Slow(Guessing):
    """Each reset says something else, and ends when training asks for its batch."""

    asked = threading.Event()

    def reset(self, number: int = 5, **columns: Any) -> str:
        assert self.asked.wait(DEADLINE_S)
        return f"{super().reset(number, **columns)} Time {self.resets}."


def test_lookahead_with_slow_reset_waits_for_it(make: Make) -> None:
    """And an evaluation between finds its own rows in its environments."""
    held: list[bool] = []

    def noted(environments: list[Any], number: list[int], **more: Any) -> list[float]:
        held.extend(each.number == wanted for each, wanted in zip(environments, number, strict=True))
        return [float(each.tries) for each in environments]

    config = {**STILL, "generation_lookahead": 1, "max_completion_length": 200, "vllm_max_model_length": 300}
    config |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
    more = {"environment_factory": Slow, "train_dataset": GUESSES, "eval_dataset": GUESSES.select(range(2))}
    trainer = make(halves, noted, config=config, **more)
    make_batch = trainer._generate_and_score_completions

    def asks(inputs: Any) -> Any:
        Slow.asked.set()
        try:
            return make_batch(inputs)
        finally:
            Slow.asked.clear()

    trainer._generate_and_score_completions = asks  # type: ignore[method-assign]
    assert len(steps_of(trainer)) == STEPS
    Slow.asked.set()
    assert len(held) == STEPS * 8 + 2 * 8
    assert all(held)


def test_lookahead_of_agents_matches_no_lookahead(make: Make) -> None:
    found = []
    for lookahead in (0, 2):
        rollouts = grpo.agents(calculator)
        trainer = make(calculates, rollout_func=rollouts, config={**STILL, "generation_lookahead": lookahead})
        seen = seen_of(trainer)
        steps = steps_of(trainer)
        found.append(([step["reward"] for step in steps], [step["agents/requests"] for step in steps], seen))
        assert rollouts.pending() == ""
    assert found[0] == found[1]
    assert [step["agents/failed"] for step in steps] == [0.0] * STEPS


@grpo.in_threads
def asks_twice(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Each row has two turns, side by side in an event loop of the function's own."""
    ids, _, _ = trainer._tokenize_prompts(prompts)
    engines = trainer.vllm_generation

    async def episode(row: int) -> list[Any]:
        first = await engines.sample(ids[row], row=row)
        second = await engines.sample([*ids[row], *first.token_ids], row=row)
        return [[*first.token_ids, *second.token_ids], [*first.logprobs, *second.logprobs]]

    async def episodes() -> list[list[Any]]:
        return await asyncio.gather(*(episode(row) for row in range(len(ids))))

    rows = asyncio.run(episodes())
    return {"prompt_ids": ids, "completion_ids": [row[0] for row in rows], "logprobs": [row[1] for row in rows]}


def test_lookahead_of_declared_rollout_func_matches_no_lookahead(make: Make) -> None:
    found = []
    for lookahead in (0, 2):
        trainer = make(calculates, rollout_func=asks_twice, config={**STILL, "generation_lookahead": lookahead})
        seen = seen_of(trainer)
        steps = steps_of(trainer)
        found.append(([step["reward"] for step in steps], [step["rollout/turns"] for step in steps], seen))
    assert found[0] == found[1]
    assert found[0][1] == [2.0] * STEPS


def test_lookahead_of_threaded_rollout_func_matches_no_lookahead(make: Make) -> None:
    @grpo.in_threads
    def in_a_pool(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids, _, _ = trainer._tokenize_prompts(prompts)
        with ThreadPoolExecutor(4) as pool:
            turns = [*pool.map(lambda row: asyncio.run(trainer.vllm_generation.sample(ids[row], row=row)), range(8))]
        return {
            "prompt_ids": ids,
            "completion_ids": [turn.token_ids for turn in turns],
            "logprobs": [turn.logprobs for turn in turns],
        }

    found = []
    for lookahead in (0, 1):
        trainer = make(calculates, rollout_func=in_a_pool, config={**STILL, "generation_lookahead": lookahead})
        seen = seen_of(trainer)
        found.append(([step["reward"] for step in steps_of(trainer)], seen))
    assert found[0] == found[1]


def test_lookahead_of_rollout_func_handling_signals_ends_job(make: Make) -> None:
    @grpo.in_threads
    def handles_signals(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        return {}

    trainer = make(calculates, rollout_func=handles_signals, config={**STILL, "generation_lookahead": 1})
    with pytest.raises((RuntimeError, JobFailed), match=r"GRPO-221.*set generation_lookahead to 0"):
        trainer.train()


def test_lookahead_counts_tool_failures_in_step_training_on_them(make: Make) -> None:
    @grpo.in_threads
    def wrong(a: int, b: int) -> int:
        """The product.

        Args:
            a: the one number
            b: the other
        """
        raise ArithmeticError("no")

    wrong.__name__ = "times"
    curves = [
        figures(steps_of(make(calculates, tools=[wrong], config={**STILL, "generation_lookahead": ahead})))
        for ahead in (0, 2)
    ]
    assert curves[0] == curves[1]
    assert all(row[-1] == 1.0 for row in curves[0])


def test_resume_with_lookahead_matches_uninterrupted_run(make: Make, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 2:
                (Path(args.output_dir) / "stop").touch()

    settings = {**STILL, "generation_lookahead": 2, "save_strategy": "steps", "save_steps": 100}
    whole = figures(steps_of(make(calculates, tools=[times_in_threads], config=settings)))
    folder = str(tmp_path / "parts")
    trainer = make(calculates, tools=[times_in_threads], callbacks=[Stops()], config={**settings, "output_dir": folder})
    with pytest.raises(SystemExit):
        trainer.train()
    again = {**settings, "output_dir": folder, "resume_from_checkpoint": "auto"}
    resumed = make(calculates, tools=[times_in_threads], config=again)
    resumed.train(resume_from_checkpoint="auto")
    assert figures([line for line in resumed.state.log_history if "reward" in line]) == whole


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            {"tools": [times]},
            r"'times', which runs in the main thread \[GRPO-220\].*mark tools and environments",
        ),
        ({"environment_factory": Guessing}, "'Guessing', which runs in the main thread"),
        ({"rollout_func": lambda prompts, trainer: {}}, "a rollout_func that is not declared .*let it be grpo.agents"),
    ],
    ids=["a tool", "an environment", "a rollout function"],
)
def test_lookahead_with_main_thread_code_raises(arguments: dict[str, Any], wanted: str, make: Make) -> None:
    with pytest.raises(ValueError, match=rf"generation_lookahead is 1 with {wanted}"):
        make(calculates, config={"generation_lookahead": 1}, **arguments)
