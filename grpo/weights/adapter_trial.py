"""Shows that the engines apply the adapters that they get, before training depends on it.

An adapter begins as nothing: B is zero, and an engine that drops it computes what the trainer computes. So the first
weight sync to an engine brings an adapter of noise, which moves the probe by many times the limit, and both sides score
that.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from grpo.weights.adapters import Lora
from grpo.weights.verifier import Verifier

MOVED_BY = 10.0  # the noise is to move log-probabilities by that many times what the proof lets pass
FIRST_DEVIATION = 0.01
MAX_DOUBLINGS = 12
NEARLY_ALL = 0.9  # of the farthest that any noise moves them


class AdapterTrial:
    """Makes the adapter of noise. Every rank has one; its methods are collective.

    Args:
        smallest: of a number of each rank: what all of them go by.
    """

    def __init__(self, lora: Lora, verifier: Verifier, smallest: Callable[[float], float]) -> None:
        self._lora = lora
        self._verifier = verifier
        self._smallest = smallest
        self._deviation: float | None = None
        self._moved = 0.0

    @contextlib.contextmanager
    def noise(self) -> Iterator[float]:
        """The trainer computes with the adapter of noise in here.

        Yields the gap up to which an engine has applied it.

        Raises:
            ValueError: no noise moves what the model computes.
        """
        if self._deviation is None:
            self._deviation, self._moved = self._choose()
        with self._lora.with_noise(self._deviation):
            yield min(self._verifier.hard_limit, self._moved / MOVED_BY)

    def _choose(self) -> tuple[float, float]:
        """The least noise that moves the probe far enough, or nearly as far as any; and how far it does.

        A small model with random weights, in 16 bits, is not moved by ten times the limit by any.
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
