"""Tools and an environment for the calculator's model."""

import asyncio
import re
from typing import Any

from tests.support.speaking_engine import (
    call,
)


def times(a: int, b: int) -> int:
    """The product.

    Args:
        a: the one number
        b: the other
    """
    return a * b


async def plus(a: int, b: int) -> int:
    """The sum.

    Args:
        a: the one number
        b: the other
    """
    await asyncio.sleep(0)
    return a + b


class Guessing:
    """Guess a number; the environment owns data and reward."""

    def __init__(self) -> None:
        self.number, self.tries, self.resets = 0, 0, 0

    def reset(self, number: int = 5, **columns: Any) -> str:
        self.number, self.tries = number, 0
        self.resets += 1
        return " Guess from 0 to 9."

    def guess(self, value: int) -> str:
        """Guess.

        Args:
            value: the guess
        """
        self.tries += 1
        return "right" if value == self.number else "lower" if value > self.number else "higher"

    def get_reward(self) -> float:
        return 1.0 / self.tries if self.tries else 0.0


def halves(text: str, seed: int) -> str:
    """Guesses in the middle of what is left."""
    low, high = 0, 9
    for value, said in re.findall(r'guess{"value": (\d+)}</c><e><t>(\w+)<e>', text):
        if said == "right":
            return "done<e>"
        low, high = (int(value) + 1, high) if said == "higher" else (low, int(value) - 1)
    return call("guess", value=(low + high) // 2)
