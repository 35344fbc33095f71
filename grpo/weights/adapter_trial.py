"""Trial of adapters: verifies that the engines apply them, before training depends on it.

A new adapter has no effect: B is zero, so an engine that drops it still matches the trainer. So the first weight sync
to an engine sends an adapter of noise, which changes the probe's log-probabilities by many times the limit, and both
sides score it.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from grpo.weights.adapters import Lora
from grpo.weights.verifier import Verifier

MOVED_BY = 10.0  # required effect of the noise on log-probabilities, in multiples of the verification's limit
FIRST_DEVIATION = 0.01
MAX_DOUBLINGS = 12
NEARLY_ALL = 0.9  # of the largest effect of any noise


class AdapterTrial:
    """Makes the adapter of noise. Every rank has one; its methods are collective.

    Args:
        smallest: minimum of a number over all ranks.
    """

    def __init__(self, lora: Lora, verifier: Verifier, smallest: Callable[[float], float]) -> None:
        self._lora = lora
        self._verifier = verifier
        self._smallest = smallest
        self._deviation: float | None = None
        self._moved = 0.0

    @contextlib.contextmanager
    def noise(self) -> Iterator[float]:
        """Put the adapter of noise into the trainer's model in a `with` block.

        Yields the largest gap of an engine that applies it.

        Raises:
            ValueError: no noise changes the model's output.
        """
        if self._deviation is None:
            self._deviation, self._moved = self._choose()
        with self._lora.with_noise(self._deviation):
            yield min(self._verifier.hard_limit, self._moved / MOVED_BY)

    def _choose(self) -> tuple[float, float]:
        """Return the smallest noise with enough effect on the probe, or nearly the largest effect; and the effect.

        A small 16-bit model with random weights cannot be changed by ten times the limit at all.
        """
        before = self._verifier.trainer_logprobs()
        tried: list[tuple[float, float]] = []
        for doublings in range(MAX_DOUBLINGS):
            deviation = FIRST_DEVIATION * 2**doublings
            with self._lora.with_noise(deviation):
                moved = self._smallest(float(np.abs(self._verifier.trainer_logprobs() - before).mean()))
            tried.append((deviation, moved))
            if moved >= MOVED_BY * self._verifier.hard_limit:
                return deviation, moved
        farthest = max(moved for _, moved in tried)
        if farthest == 0:
            raise ValueError(
                "noise in the adapters changes nothing that the model computes: are the layers in target_modules used?"
            )
        return next((deviation, moved) for deviation, moved in tried if moved >= NEARLY_ALL * farthest)
