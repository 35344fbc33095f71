"""How long a rank waits in collectives while it trains, where the backend makes it wait: gloo.

NCCL's collectives run in the GPU's streams, and `wait` returns at once: there this says nothing, and is not logged.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_clocks: list["WaitClock"] = []


class WaitClock:
    """Adds up the seconds that the main thread spends in `torch.distributed.Work.wait`, whoever calls it.

    Args:
        counts: asked at each wait; waits in generation and push have metrics of their own.
    """

    def __init__(self, counts: Callable[[], bool]) -> None:
        self._counts = counts
        self._waited_s = 0.0
        _clocks[:] = [self]
        if not hasattr(dist.Work.wait, "timed"):
            dist.Work.wait = _timed(dist.Work.wait)

    def take_s(self) -> float:
        """Seconds since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def add(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread() and self._counts():
            self._waited_s += seconds


def _timed(wait: Callable[..., Any]) -> Callable[..., Any]:
    def timed_wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return wait(self, *args, **kwargs)
        finally:
            for clock in _clocks:
                clock.add(time.perf_counter() - begun)

    timed_wait.timed = True  # type: ignore[attr-defined]
    return timed_wait
