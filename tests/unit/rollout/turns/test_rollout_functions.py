"""Rollout functions in the real trainer, over an engine that says what is written down."""

import asyncio
import contextlib
import io
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from signal import alarm
from signal import signal as set_handler
from types import SimpleNamespace
from typing import Any

import pytest

from grpo import GRPOTrainer
from grpo.faults.deadlines import CallLimits
from grpo.rollout.turns import batch
from tests.support.engines import Script, ScriptedEngine
from tests.support.speaking_engine import TOKENIZER, Make, calculates, steps_of


def test_rollout_func_calls_generate_twice_with_unique_seeds(make: Make, script: Script) -> None:
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


def test_rollout_func_with_own_agent_loop_counts_turns(make: Make) -> None:
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
def test_rollout_func_with_bad_output_raises(make: Make, output: Any, message: str) -> None:
    trainer = make(calculates, rollout_func=lambda prompts, trainer: output)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_rollout_func_with_error_or_hang_fails_training(make: Make) -> None:
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


def test_rollout_timeout_excludes_time_without_engine(
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


def test_generate_and_sample_outside_rollout_func_raise(make: Make) -> None:
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


def test_generate_with_refused_prompt_leaves_row_out(make: Make) -> None:
    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [[5] * (200 if row == 3 else 5) for row in range(8)]
        _, said, logprobs, _ = trainer.vllm_generation.generate(prompts=ids, images=None, num_generations=4)
        return {"prompt_ids": ids, "completion_ids": said, "logprobs": [[each[0] for each in row] for row in logprobs]}

    expect_one_left_out(make, rollout)


def test_sample_with_refused_prompt_leaves_row_out(make: Make) -> None:
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


def test_generate_refused_in_later_turn_leaves_row_out(make: Make) -> None:
    """What stands for it there is no token that the model has said."""
    rollout = generates([[5]] * 8, [[5] * (200 if row == 3 else 5) for row in range(8)])
    first, _ = steps_of(make(calculates, nothing, rollout_func=rollout))
    assert first["rollout/refused"] == 1


def test_generate_of_some_rows_counts_turns_and_raises_on_refusal(make: Make) -> None:
    rollout = generates([[5]] * 8, [[6]] * 3)
    first, _ = steps_of(make(calculates, nothing, rollout_func=rollout))
    assert first["rollout/turns"] == 11 / 8
    with pytest.raises(ValueError, match="generate was given 3 prompts, and the batch has 8 rows"):
        make(calculates, rollout_func=generates([[5]] * 8, [[6] * 200] * 3)).train()


# -- which thread calls it --------------------------------------------------------------------------------------------


def sets_an_alarm() -> None:
    before = set_handler(signal.SIGALRM, signal.SIG_DFL)
    alarm(60)
    alarm(0)
    set_handler(signal.SIGALRM, before)


def in_its_way(way: str, before: Callable[[], None] = lambda: None) -> Any:
    """A rollout function that asks for two turns of each row, by `generate` or by `sample`."""

    async def episode(row: int, trainer: GRPOTrainer) -> tuple[list[int], list[float]]:
        turns = [
            await trainer.vllm_generation.sample([5] * (turn + 1), row=row, turn=turn, max_tokens=40)
            for turn in range(2)
        ]
        return turns[0].token_ids, turns[0].logprobs

    async def episodes(trainer: GRPOTrainer) -> list[Any]:
        return await asyncio.gather(*(episode(row, trainer) for row in range(8)))

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        before()
        if way == "generate":
            return generates([[5]] * 8, [[5, 5]] * 8)(prompts, trainer)
        said, logprobs = zip(*asyncio.run(episodes(trainer)), strict=True)
        return {"prompt_ids": [[5]] * 8, "completion_ids": [*said], "logprobs": [*logprobs]}

    return rollout


def says_its_seed(text: str, seed: int) -> str:
    return f"{seed % 97}<e>"


def tells_tokens_apart(completion_ids: list[list[int]], **more: Any) -> list[float]:
    return [float(sum(place * token for place, token in enumerate(ids, 1))) for ids in completion_ids]


def test_rollout_func_keeps_its_thread_between_batches(make: Make) -> None:
    opened: list[sqlite3.Connection] = []

    def remembers() -> None:
        if not opened:
            opened.append(sqlite3.connect(":memory:"))
        opened[0].execute("SELECT 1")
        threads.append(threading.current_thread().name)

    threads: list[str] = []
    assert len(steps_of(make(calculates, nothing, rollout_func=in_its_way("generate", remembers)))) == 2
    assert threads == ["grpo-rollout"] * 2


@pytest.mark.parametrize("way", ["generate", "sample"])
def test_rollout_func_setting_alarm_restarts_in_main_thread(
    make: Make, script: Script, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    """It begins again there, with the seeds that it had."""
    threads: list[str] = []

    def bounded() -> None:
        threads.append(threading.current_thread().name)
        with contextlib.suppress(ValueError):  # as a judge that takes it for a failure of the program
            sets_an_alarm()

    plain = [step["reward"] for step in steps_of(make(says_its_seed, tells_tokens_apart, rollout_func=in_its_way(way)))]
    num_plain = len(script.samples)
    steps = steps_of(make(says_its_seed, tells_tokens_apart, rollout_func=in_its_way(way, bounded)))
    assert [step["reward"] for step in steps] == plain
    assert len({*plain}) == 2
    assert threads == ["grpo-rollout", "MainThread", "MainThread"]
    assert [step["rollout/turns"] for step in steps] == [2.0, 2.0]
    seeds = [sample.seed for sample in script.samples]
    assert sorted(seeds[num_plain:]) == sorted([*seeds[: num_plain // 2], *seeds[:num_plain]])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "main thread" in line]
    assert line.startswith(
        "[grpo] rank 0: WARNING: rollout_func cannot run beside the main thread: it calls signal.signal; "
    )


@pytest.mark.parametrize("way", ["generate", "sample"])
def test_rollout_func_in_main_thread_survives_engine_death(make: Make, script: Script, way: str) -> None:
    trainer = make(says_its_seed, tells_tokens_apart, rollout_func=in_its_way(way, sets_an_alarm))
    plain = [step["reward"] for step in steps_of(trainer)]
    trainer = make(says_its_seed, tells_tokens_apart, rollout_func=in_its_way(way, sets_an_alarm))
    before = len(script.started)
    script.deaths.append(("submit", script.asked["submit"] + 1))
    assert [step["reward"] for step in steps_of(trainer)] == plain
    assert len(script.started) > before


@pytest.mark.parametrize("way", ["generate", "sample"])
def test_rollout_func_in_main_thread_ends_at_rollout_timeout(make: Make, way: str) -> None:
    release = threading.Event()

    def hangs(text: str, seed: int) -> str:
        release.wait(60.0)
        return "17<e>"

    def catches(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        sets_an_alarm()
        try:
            return in_its_way(way)(prompts, trainer)
        except Exception:  # noqa: BLE001  as agents do, which make something up
            return {"prompt_ids": [[5]] * 8, "completion_ids": [[6]] * 8, "logprobs": [[-1.0]] * 8}

    config = {"rollout_timeout": 1.0, "tool_timeout": 0.5}
    try:
        with pytest.raises(TimeoutError, match=r"GRPO-608.* turn -?\d of row \d of rank 0, which an engine samples"):
            make(hangs, nothing, rollout_func=catches, config=config).train()
    finally:
        release.set()


def test_rollout_func_redirected_stdout_holds_only_its_prints(make: Make) -> None:
    collected: list[str] = []
    inside, goes_on = threading.Event(), threading.Event()

    def prints() -> None:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            inside.set()
            assert goes_on.wait(60.0)
            print("mine")
        collected.append(out.getvalue())

    trainer = make(says_its_seed, tells_tokens_apart, rollout_func=in_its_way("generate", prints))
    before, check = sys.stdout, trainer._parts.run.watch.check

    def checks() -> None:
        """What the main thread does while it waits."""
        if inside.is_set():
            print("a line of the log")
            goes_on.set()
        check()

    trainer._parts.run.watch.check = checks  # type: ignore[method-assign]
    trainer.train()
    assert collected == ["mine\n"] * 2
    assert sys.stdout is before


def test_rollout_func_without_logprobs_with_engine_clip_raises(make: Make) -> None:
    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
        _, said, _, _ = trainer.vllm_generation.generate(prompts=ids, images=None, num_generations=4)
        return {"prompt_ids": ids, "completion_ids": said, "logprobs": None}

    engine = {"old_logprobs": "engine"}
    trainer = make(calculates, lambda completions, **more: [0.0] * 8, rollout_func=rollout, config=engine)
    with pytest.raises(ValueError, match="rollout_func gives no logprobs"):
        trainer.train()
