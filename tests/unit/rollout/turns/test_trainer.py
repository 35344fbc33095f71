"""Tools, environments and rollout functions in the real trainer, over an engine that says what is written down."""

import contextlib
import gc
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from grpo.faults.failure import JobFailed
from grpo.preflight import inputs
from tests.support.engines import Script
from tests.support.made_up_tools import Guessing, halves, plus, times
from tests.support.scripted_trainer import Steps
from tests.support.speaking_engine import TOKENIZER, USER, Make, calculates, call, right, steps_of

LONG = {"max_completion_length": 250, "vllm_max_model_length": 300}


@pytest.mark.parametrize("old_logprobs", ["trainer", "engine"])
def test_train_with_tools_masks_tool_tokens(old_logprobs: str, make: Make, script: Script) -> None:
    seen: list[dict[str, Any]] = []
    trainer = make(calculates, tools=[times], config={"old_logprobs": old_logprobs})
    score = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        seen.append(score(inputs))
        return seen[-1]

    trainer._generate_and_score_completions = noted  # type: ignore[method-assign]
    first, second = steps_of(trainer)
    assert first["reward"] == second["reward"] == 0.5  # every other seed
    assert (first["rollout/turns"], first["tools/call_frequency"]) == (1.5, 0.5)
    assert first["tools/failure_frequency"] == first["tools/abandoned"] == 0
    assert first.get("sampling/importance_sampling_ratio/mean", 0) > 0 or old_logprobs == "engine"
    assert seen[0]["num_items_in_batch"] == (seen[0]["completion_mask"] * seen[0]["tool_mask"]).sum()
    for row in range(8):
        ids, mask = seen[0]["completion_ids"][row], seen[0]["completion_mask"][row].bool()
        text = TOKENIZER.decode(ids[mask])
        foreign = TOKENIZER.decode(ids[mask & ~seen[0]["tool_mask"][row].bool()])
        if "<c>" in text:
            result = text.partition("<t>")[2].partition("<e>")[0]
            assert re.fullmatch(rf'<c>times{{"a": \d+, "b": \d+}}</c><e><t>{result}<e><a>{result}<e>', text)
            assert foreign == f"<t>{result}<e><a>"
            logprobs = seen[0]["sampling_per_token_logps"][row][mask]
            assert (logprobs == 0).sum() == len(result) + 3
        else:
            assert (text, foreign) == ("17<e>", "")
    assert {len(sample.ids) for sample in script.samples} == {1}
    again = [sample for sample in script.samples if "<t>" in TOKENIZER.decode(sample.token_ids)]
    assert all(sample.overrides["max_tokens"] < 64 for sample in again)


def test_train_with_same_seed_repeats_curve_at_any_tool_speed(
    make: Make, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools take their time, another one at each turn."""
    rng = np.random.default_rng()

    def slowly(a: int, b: int) -> int:
        """The product.

        Args:
            a: the one number
            b: the other
        """
        time.sleep(rng.random() / 50)
        return a * b

    slowly.__name__ = "times"
    curves = []
    for tool in (times, slowly, slowly):
        script.samples.clear()
        steps = steps_of(make(calculates, tools=[tool]))
        asked = {(sample.seed, tuple(sample.token_ids.tolist())) for sample in script.samples}
        curves.append(([step["loss"] for step in steps], [step["grad_norm"] for step in steps], asked))
    assert curves[0] == curves[1] == curves[2]


def test_train_with_sync_and_async_tools_answers_both(make: Make) -> None:
    def reply(text: str, seed: int) -> str:
        if (asked := USER.search(text)) is None:
            return "".join(re.findall(r"<t>(\d+)<e>", text)) + "<e>"
        arguments = {"a": int(asked[1]), "b": int(asked[2])}
        return call("plus", **arguments).removesuffix("<e>") + call("times", **arguments)

    def both(completions: list[Any], prompts: list[Any], **more: Any) -> list[float]:
        wanted = []
        for prompt in prompts:
            a, b = map(int, prompt[0]["content"].split("*"))
            wanted.append(f"{a * b}{a + b}")  # asynchronous ones last
        return [float(said[-1]["content"] == each) for said, each in zip(completions, wanted, strict=True)]

    assert steps_of(make(reply, both, tools=[times, plus], config=LONG))[0]["reward"] == 1.0


def test_train_with_hanging_tool_abandons_call_and_goes_on(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()

    def stuck(a: int, b: int) -> int:
        """The product, some day.

        Args:
            a: the one number
            b: the other
        """
        release.wait()
        return 0

    def reply(text: str, seed: int) -> str:
        return "sorry<e>" if "<t>" in text else call("stuck", a=1, b=2) if seed % 4 == 1 else "17<e>"

    def polite(completions: list[Any], **more: Any) -> list[float]:
        return [float(said[-1]["content"] == "sorry") for said in completions]

    config = {"tool_timeout": 0.2, "max_completion_length": 150, "vllm_max_model_length": 200}
    (first, second) = steps_of(make(reply, polite, tools=[stuck], config=config))
    assert first["reward"] == second["reward"] == 2 / 8  # one of each prompt's four
    assert first["tools/abandoned"] == 2
    assert "rank 0: WARNING: tool stuck, called in row" in capsys.readouterr().out
    release.set()


def test_train_above_max_abandoned_tools_raises(make: Make) -> None:
    release = threading.Event()

    def stuck() -> int:
        """Never."""
        release.wait()
        return 0

    config = {"tool_timeout": 0.2, "max_abandoned_tools": 2}
    trainer = make(lambda text, seed: call("stuck"), tools=[stuck], config=config)
    with pytest.raises(RuntimeError, match=r"more than 2 .*GRPO-609.*tool stuck, called in row \d"):
        trainer.train()
    release.set()


def test_train_at_rollout_timeout_names_pending_tool(make: Make) -> None:
    release = threading.Event()

    def stuck() -> int:
        """Never."""
        release.wait()
        return 0

    config = {"tool_timeout": 2.0, "rollout_timeout": 3.0, "max_abandoned_tools": 99, "max_tool_threads": 1}

    def reply(text: str, seed: int) -> str:
        return call("stuck")

    trainer = make(reply, tools=[stuck], config={**config, "max_completion_length": 400, "vllm_max_model_length": 500})
    with pytest.raises(TimeoutError, match=r"after 3 s .*GRPO-608\]; it waits for tool stuck of row"):
        trainer.train()
    release.set()


@pytest.mark.parametrize("max_tool_threads", [None, 8])
def test_environment_with_hanging_call_is_not_reused(make: Make, max_tool_threads: int | None) -> None:
    release, made = threading.Event(), []

    class Stuck(Guessing):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def guess(self, value: int) -> str:
            """Guess.

            Args:
                value: the guess
            """
            if self.resets == 1 and self is made[0]:
                release.wait()
            return super().guess(value)

    config = {**LONG, "tool_timeout": 0.3, "max_tool_threads": max_tool_threads}
    trainer = make(halves, None, environment_factory=Stuck, train_dataset=None, config=config)
    first, second = steps_of(trainer)
    assert (first["tools/abandoned"], second["tools/abandoned"]) == (1, 0)
    assert [each.resets for each in made] == [1, *[2] * 7, 1]
    release.set()


def test_trainer_after_deletion_leaves_no_threads(make: Make) -> None:
    before = set(threading.enumerate())
    trainer = make(calculates, tools=[times], config={"max_steps": 1})
    trainer.train()
    del trainer
    gc.collect()
    deadline = time.monotonic() + 20
    while left := {each for each in set(threading.enumerate()) - before if each.name.startswith("grpo-t")}:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_environment_with_own_data_and_reward_trains(make: Make) -> None:
    trainer = make(halves, None, environment_factory=Guessing, train_dataset=None, config=LONG)
    first, _ = steps_of(trainer)
    assert first["reward"] == pytest.approx(1 / 3)  # 4, 7, 5
    assert first["rollout/turns"] == 4
    assert all(environment.resets == 2 for environment in trainer._environment_pool[None])  # made once


def test_train_with_two_environment_kinds_logs_reward_of_each(make: Make) -> None:
    class Once(Guessing):
        def reset(self, **columns: Any) -> str:
            self.number, self.tries = 4, 0
            return " Guess."

    rows = {"environment": ["often", "once"] * 4, "number": [5] * 8}
    data = Dataset.from_dict({**rows, "prompt": [[{"role": "user", "content": "Play."}]] * 8})
    factories = {"often": Guessing, "once": Once}
    first, _ = steps_of(make(halves, None, environment_factory=factories, train_dataset=data, config=LONG))
    rewards = [first[f"rewards/{name}/mean"] for name in ("Guessing", "Once")]
    assert {round(reward, 3) for reward in rewards if reward == reward} <= {0.333, 1.0}


def test_environment_with_failing_reset_ends_job_with_its_error(make: Make) -> None:
    class Broken(Guessing):
        def reset(self, **columns: Any) -> str:
            raise OSError("the game server is down")

    trainer = make(halves, None, environment_factory=Broken, train_dataset=None, config=LONG)
    with pytest.raises(OSError, match="the game server is down"):
        trainer.train()


# -- deaths -----------------------------------------------------------------------------------------------------------


_calm: list[list[dict[str, Any]]] = []


@pytest.fixture
def calm(make: Make, script: Script) -> list[dict[str, Any]]:
    """The steps of a training in which nothing dies; of the first test that asks."""
    if not _calm:
        _calm.append(steps_of(make(calculates, tools=[times])))
        script.asked.clear()
    return _calm[0]


def test_train_after_engine_death_in_episode_gives_same_results(
    make: Make, script: Script, calm: list[dict[str, Any]]
) -> None:
    script.deaths.append(("submit", 11))  # in the second turns
    stirred = steps_of(make(calculates, tools=[times]))
    assert [step["loss"] for step in calm] == [step["loss"] for step in stirred]
    assert [step["reward"] for step in calm] == [step["reward"] for step in stirred]
    assert stirred[0]["engine/requests_reissued"] > 0


@pytest.mark.parametrize("death", ["in a weight sync", "idle"])
def test_train_after_engine_death_between_batches_gives_same_losses(
    make: Make, script: Script, calm: list[dict[str, Any]], death: str
) -> None:
    if death == "in a weight sync":
        script.deaths.append(("update_weights", 2))

    def right_and_deadly(completions: list[Any], **more: Any) -> list[float]:
        if death == "idle" and trainer.state.global_step == 0:
            script.started[-1].die()
        return right(completions, **more)

    right_and_deadly.__name__ = "right"
    trainer = make(calculates, right_and_deadly, tools=[times])
    stirred = steps_of(trainer)
    assert [step["loss"] for step in calm] == [step["loss"] for step in stirred]
    assert stirred[-1]["engine/restarts"] == 1
    assert stirred[-1]["weight_sync/repeats"] == (death == "in a weight sync")


def test_train_after_engine_death_during_hanging_tool_restarts_engine(make: Make, script: Script) -> None:
    """The main thread, which all ranks need to bring the engine back, is in the tool."""
    never, calls = threading.Event(), []

    def hangs(a: int, b: int) -> int:
        """The product, some day.

        Args:
            a: the one number
            b: the other
        """
        calls.append(a)
        if len(calls) == 1:
            script.started[-1].die()
            never.wait()
        return a * b

    hangs.__name__ = "times"
    first, _ = steps_of(make(calculates, tools=[hangs], config={"tool_timeout": 0.5, **LONG}))
    assert first["engine/restarts"] == 1
    assert first["tools/abandoned"] == 1
    assert first["reward"] == 3 / 8


def test_job_failure_in_tool_catching_everything_ends_job(make: Make) -> None:
    reported: list[str] = []

    def catches(a: int, b: int) -> str:
        """The product, whatever happens.

        Args:
            a: the one number
            b: the other
        """
        failing = threading.Thread(target=trainer._parts.run.watch.fail, args=["a fault elsewhere"])
        try:
            failing.start()
            while True:
                time.sleep(0.01)
        except Exception as error:  # noqa: BLE001  as users write it
            reported.append(type(error).__name__)
        failing.join()
        return "all is well"

    catches.__name__ = "times"
    trainer = make(calculates, tools=[catches])
    with pytest.raises(JobFailed, match="a fault elsewhere"):
        trainer.train()
    assert reported == ["JobFailed"]


def test_train_after_engine_death_without_restarts_left_fails(make: Make, script: Script) -> None:
    script.deaths.append(("submit", 11))
    trainer = make(calculates, tools=[times], config={"vllm_max_restarts": 0})
    with pytest.raises(JobFailed, match="killed by signal 9"):
        trainer.train()


# -- prompts that no engine takes -------------------------------------------------------------------------------------


def test_train_with_too_long_prompt_leaves_its_rows_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": 408} for text in ("12*34", "12*34" + 90 * " ")]
    data = Dataset.from_list(rows)
    shown: list[int] = []

    def reward(completions: list[Any], **more: Any) -> list[float]:
        shown.append(len(completions))
        return right(completions, **more)

    monkeypatch.setattr(inputs, "check_prompt_lengths", lambda *args: None)  # as of rows made on the fly
    trainer = make(
        calculates, reward, tools=[times], train_dataset=data, config={"max_steps": 1, "shuffle_dataset": False}
    )
    (only,) = steps_of(trainer)
    assert shown == [4]
    assert only["rollout/refused"] == 4
    assert only["reward"] == 0.5


# -- attempts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_resume_with_episodes_matches_uninterrupted_run(kind: str, make: Make, tmp_path: Path) -> None:
    """A stop between batches, and a resume: the same samples, the same weights."""

    def hastily(text: str, seed: int) -> str:
        """It guesses once, every other time."""
        return halves(text, seed) if seed % 2 or "<t>" in text else "5<e>"

    how: dict[str, Any] = {"tools": [times]}
    if kind == "environment":
        how = {"environment_factory": Guessing, "train_dataset": None}
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, **LONG}

    def trained(folder: str, stop_at: int = 0, **config: Any) -> list[tuple[float, ...]]:
        output_dir = tmp_path / folder
        reply, reward = (calculates, right) if kind == "tools" else (hastily, None)
        trainer = make(reply, reward, config={**saving, "output_dir": str(output_dir), **config}, **how)
        trainer.add_callback(Steps([], stop_at, output_dir))
        with pytest.raises(SystemExit) if stop_at else contextlib.nullcontext():
            trainer.train()
        names = "loss", "grad_norm", "reward", "rollout/turns"
        return [tuple(step[name] for name in names) for step in trainer.state.log_history if "reward" in step]

    whole = trained("whole")
    assert len({step[0] for step in whole}) > 1
    assert trained("parts", stop_at=2) == whole[:2]
    assert trained("parts", resume_from_checkpoint="auto") == whole
