"""The interface of one engine, as the rest of the package uses it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo.engine.client import EngineDied, EngineError
from grpo.engine.messages import EngineSpec, Ready, Sample, Sampled
from grpo.faults.failure import FailureKind


class EngineLike(Protocol):
    """One engine of this node, for one life. `EngineClient` is one, and its methods say how they wait and fail."""

    @property
    def name(self) -> str:
        """For messages, e.g. `engine 0 of node 1`."""

    @property
    def pid(self) -> int:
        """Also the id of the session that holds all processes of this engine."""

    @property
    def private_folder(self) -> Path:
        """Holds the engine's temporary files, and goes with it."""

    @property
    def is_dead(self) -> bool:
        """Whether it has ended."""

    def wait_ready(self, timeout_s: float, check: Callable[[], None] = ...) -> Ready:
        """Wait until it takes work; raises EngineError."""

    def listen(self, hear: Callable[[Sampled | EngineError], None]) -> None:
        """Give answers and its end to `hear` from now on; at once if it is dead."""

    def submit(self, sample: Sample) -> None:
        """Send completions to be sampled."""

    def abort(self, ids: Sequence[int]) -> None:
        """Drop completions, which are not answered any more."""

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        """Run a control call and wait for its value; raises EngineError."""

    def error(self, what: str, kind: FailureKind | None = None) -> EngineError:
        """An error about this engine."""

    def close(self) -> None:
        """End it and all that it started. Safe to call twice."""


class StartEngine(Protocol):
    """Starts an engine and returns at once, with the arguments of `EngineClient`."""

    def __call__(
        self,
        spec: EngineSpec,
        *,
        name: str,
        environment: Mapping[str, str],
        log_path: Path,
        on_death: Callable[[EngineDied], None] | None,
        stopped_timeout_s: float,
        stall_timeout_s: float | None,
    ) -> EngineLike: ...
