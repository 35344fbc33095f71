"""A client of OpenEnv as an environment: its `reset` and `step`, with an action and an observation, behind a tool."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.speaking_engine import Make, call, steps_of


@dataclass
class GuessAction:
    """As OpenEnv's actions are: a record that goes to the environment's server."""

    number: int


@dataclass
class GuessObservation:
    message: str
    reward: float | None = None
    done: bool = False


@dataclass
class StepResult:
    observation: GuessObservation
    reward: float | None = None
    done: bool = False


@dataclass
class GuessEnv:
    """In place of OpenEnv's `EnvClient`, whose `reset` and `step` ask a server in a container."""

    base_url: str
    target: int = 0
    asked: list[int] = field(default_factory=list)

    def reset(self, seed: int) -> StepResult:
        self.target = seed % 3
        return StepResult(GuessObservation("guess"))

    def step(self, action: GuessAction) -> StepResult:
        self.asked.append(action.number)
        done = action.number == self.target
        return StepResult(GuessObservation("right" if done else "wrong", float(done), done), float(done), done)


class Guessing:
    """What `environment_factory` makes, as docs/tasks.md has it."""

    def __init__(self) -> None:
        self.client = GuessEnv(base_url="http://127.0.0.1:8000")

    def reset(self, answer: int, **row: Any) -> None:
        self.reward = 0.0
        self.client.reset(seed=answer)

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            What comes of it.
        """
        result = self.client.step(GuessAction(number=number))
        self.reward = max(self.reward, result.reward or 0.0)
        return result.observation.message

    def get_reward(self) -> float:
        return self.reward


def test_openenv_client_trains_as_environment(make: Make) -> None:
    """It guesses one number after the other, until it is right."""

    def reply(text: str, seed: int) -> str:
        if text.endswith("<t>right<e><a>"):
            return "done<e>"
        return call("guess", number=text.count("<t>wrong"))

    def counts(completions: list[Any], answer: list[int], **more: Any) -> list[float]:
        guesses = [sum("tool_calls" in message for message in said) for said in completions]
        assert guesses == [each % 3 + 1 for each in answer]
        return [float(each) for each in guesses]

    config = {"max_completion_length": 150, "vllm_max_model_length": 200}
    steps = steps_of(make(reply, counts, environment_factory=Guessing, config=config))
    assert [step["rewards/counts/mean"] >= 1.0 for step in steps] == [True, True]
