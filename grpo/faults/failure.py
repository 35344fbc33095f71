"""Failure records, their kinds and exceptions, and the table of decisions. Standard library only."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

MAX_CAUSE = 16_000  # characters
MAX_CAUSE_BYTES = 100_000  # in JSON, where one character may take 12: a record is sent in one packet
_GAP = "\n...\n"


class FailureKind(StrEnum):
    """Kind of a failure: the thing to change before a restart can succeed. `ANSWERS` has the decision for each."""

    USER = "user"
    """User input: a setting, data, a function."""
    MEMORY = "memory"
    """Device memory, filled by this job itself."""
    MACHINE = "machine"
    """A process, device, disk or network; also unknown causes."""
    NODE_LOST = "node_lost"
    """A node is off, cut off or silent."""
    ENGINE = "engine"
    """An engine died, is stuck, or refused a valid request."""
    STOP = "stop"
    """No failure: a stop was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Location, time and cause of a failure.

    Example:
        FailureRecord(node=1, rank=8, host="gpu02", phase="weight sync", cause="EngineError: engine 0 died",
        kind="engine")
    """

    node: int
    rank: int
    """-1 if there are no ranks yet."""
    host: str
    phase: str
    """Phase of the rank: `engine start`, `generate`, `sync`, `train` …"""
    cause: str
    """Error text for the user; an engine's includes the last lines of its log."""
    kind: FailureKind = FailureKind.MACHINE
    nodes: tuple[int, ...] = ()
    """Silent nodes, by `grpo launch`'s numbers: spare nodes can replace them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", _bounded(self.cause))
        object.__setattr__(self, "kind", FailureKind(self.kind))  # from JSON they come as a string and a list
        object.__setattr__(self, "nodes", tuple(self.nodes))

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}), rank {self.rank}, phase '{self.phase}': {self.cause}"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict."""
        return {**asdict(self), "nodes": list(self.nodes)}


def _bounded(cause: str) -> str:
    """Shorten a cause to its beginning and end; escape lone surrogates, which UTF-8 cannot encode."""
    cause = cause.encode(errors="backslashreplace").decode()
    kept, half = cause, MAX_CAUSE // 2
    while len(kept) > MAX_CAUSE + len(_GAP) or len(json.dumps(kept)) > MAX_CAUSE_BYTES:
        kept = cause[:half] + _GAP + cause[-half:]
        half //= 2
    return kept


class GrpoError(RuntimeError):
    """Base of errors with a failure kind."""

    kind = FailureKind.MACHINE

    def __init__(self, text: str, *, kind: FailureKind | None = None) -> None:
        super().__init__(text)
        self.kind = kind or self.kind


class JobFailed(GrpoError):
    """The job failed on some rank; `record` has where and why."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(f"the job failed on {record}", kind=record.kind)
        self.record = record


class StepFailed(JobFailed):
    """This step cannot be finished, but the trainer's state is intact: the last step can be saved. Raised on every
    rank."""


class GenerationDropped(GrpoError):
    """An engine was lost after a stop was requested: no more generation. Raised on every rank."""

    kind = FailureKind.STOP

    def __init__(self, why: str) -> None:
        text = f"a stop was asked for ({why}), and an engine is gone: the last finished step is kept [GRPO-612]"
        super().__init__(text)
        self.why = why


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, each once: `raise error from error` makes a cycle."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


class Decision(StrEnum):
    """Reaction to a failure."""

    END = "end"
    """Exit code 1: a restart would fail again."""
    START_AGAIN = "start again"
    """Exit code 85, then a restart from the newest complete checkpoint. Counts as a crash: `--max-crashes` of them
    without a newer checkpoint end the job."""
    REQUEUE = "requeue"
    """Exit code 85, not counted as a crash."""
    REPLACE_NODE = "replace a node"
    """As `START_AGAIN`; with spare nodes, lost nodes are replaced."""


_END, _START, _REQUEUE, _REPLACE = Decision.END, Decision.START_AGAIN, Decision.REQUEUE, Decision.REPLACE_NODE

ANSWERS: dict[str, tuple[Decision, Decision, Decision]] = {
    # Decision before the job's first optimizer step; after it; after it, if a crash came without a newer checkpoint.
    FailureKind.USER: (_END, _START, _END),
    FailureKind.MEMORY: (_END, _START, _END),
    FailureKind.MACHINE: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.NODE_LOST: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.ENGINE: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.STOP: (_REQUEUE, _REQUEUE, _REQUEUE),
}


def answer_to(kind: str | None, *, is_behind_first_step: bool, was_seen: bool = False) -> Decision:
    """Return the decision for a failure.

    Args:
        kind: a `FailureKind`; any other value counts as MACHINE.
        is_behind_first_step: the job has finished an optimizer step; true for a run resumed from a checkpoint.
        was_seen: an earlier attempt crashed, and no newer checkpoint was completed since.
    """
    answers = ANSWERS.get(kind or "", ANSWERS[FailureKind.MACHINE])
    return answers[is_behind_first_step + (is_behind_first_step and was_seen)]


def answer_to_end(state: Mapping[str, Any] | None, *, was_seen: bool = False) -> Decision:
    """Return the decision for an unfinished attempt, from its `run_state.json`; None is an unknown state."""
    state = state or {}
    kind = FailureKind.STOP if state.get("state") == "stopped" else state.get("kind")
    return answer_to(kind, is_behind_first_step=bool(state.get("step")), was_seen=was_seen)
