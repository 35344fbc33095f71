"""A batch of four completions, and functions that score it without a trainer."""

import asyncio
from collections.abc import Callable
from typing import Any

from trl.trainer.utils import is_async_callable

from grpo.faults.watch import FailureWatch
from grpo.rewards.batch import Rows
from grpo.rewards.scoring import Scoring

PATIENCE_S = 60.0
TEXTS = ["a", "bb", "ccc", "dddd"]
IDS = [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]]
GROUPS = [[0, 1], [2, 3]]


class Batch:
    """A batch of four completions, scored by these functions."""

    def __init__(self, watch: FailureWatch, loop: asyncio.AbstractEventLoop, *funcs: Any, beside: bool = True) -> None:
        self.said: list[str] = []
        self.extra: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []
        self.scoring = Scoring(
            funcs, watch, timeout_s=PATIENCE_S, beside=beside, loop=lambda: loop, say=self.said.append
        )
        self.loop = loop
        self.begin()

    def begin(self) -> None:
        self.scoring.begin(rows(), GROUPS)

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.scoring.add(number, TEXTS[number], IDS[number])

    def start(self, texts: list[str] = TEXTS, refused: list[bool] | None = None) -> None:
        self.scoring.start(rows(), texts, IDS, GROUPS, refused=refused)

    def rewards(self) -> list[Any]:
        """As TRL calls the functions."""
        found = []
        for stand_in in self.scoring.stand_ins():
            given = {
                "prompts": [],
                "completions": [],
                "log_extra": lambda column, values: self.extra.append((column, values)),
                "log_metric": lambda name, value: self.metrics.append((name, value)),
            }
            if is_async_callable(stand_in):
                found.append(asyncio.run_coroutine_threadsafe(stand_in(**given), self.loop).result(PATIENCE_S))
            else:
                found.append(stand_in(**given))
        return found


def rows() -> Rows:
    inputs = [{"prompt": f"p{number // 2}", "answer": number} for number in range(4)]
    return Rows(inputs, [row["prompt"] for row in inputs], None, "state")


MakeBatch = Callable[..., Batch]


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def length_later(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


class Scorer:
    def __call__(self, answer: list[int], **_: Any) -> list[float]:
        return [float(value) for value in answer]
