"""Interface of one engine, for the rest of the package."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo.engine.client import EngineDied, EngineError
from grpo.engine.messages import EngineSpec, Ready, Sample, Sampled
from grpo.faults.failure import FailureKind


class EngineLike(Protocol):
    """One engine of this node, for one life. `EngineClient` implements it; its docstrings have deadlines and errors."""

    @property
    def name(self) -> str:
        """Name for messages, e.g. `engine 0 of node 1`."""

    @property
    def pid(self) -> int:
        """Pid of the host; also the id of the session of all processes of this engine."""

    @property
    def private_folder(self) -> Path:
        """Folder of the engine's temporary files, removed with it."""

    @property
    def is_dead(self) -> bool:
        """True once it has ended."""

    def wait_ready(self, timeout_s: float, check: Callable[[], None] = ...) -> Ready:
        """Wait until it takes work; raises EngineError."""

    def listen(self, on_answer: Callable[[Sampled | EngineError], None]) -> None:
        """Send results, and the engine's end, to `on_answer` from now on; immediately if it is dead."""

    def submit(self, sample: Sample) -> None:
        """Send completions to be sampled."""

    def abort(self, ids: Sequence[int]) -> None:
        """Drop completions; they are not answered any more."""

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        """Run a control call and return its value; raises EngineError."""

    def error(self, what: str, kind: FailureKind | None = None) -> EngineError:
        """Make an error about this engine."""

    def close(self) -> None:
        """End it and all its processes. Safe to call twice."""


class StartEngine(Protocol):
    """Starts an engine and returns at once; takes the arguments of `EngineClient`."""

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
