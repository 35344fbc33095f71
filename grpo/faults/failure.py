"""A failure's kind and record, the errors that carry them, and what follows: one table. Needs nothing but Python."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

MAX_CAUSE = 16_000  # characters
MAX_CAUSE_BYTES = 100_000  # in JSON, where one may take 12: a record goes from process to process in one packet
_GAP = "\n...\n"


class FailureKind(StrEnum):
    """What has to change before another start ends otherwise. `grpo.faults.failure` says what follows each."""

    USER = "user"
    """What the user wrote: a setting, data, a function."""
    MEMORY = "memory"
    """A device's memory, which this job itself fills."""
    MACHINE = "machine"
    """A process, device, disk or network; also what nobody has named."""
    NODE_LOST = "node_lost"
    """A node that is off, cut off or silent."""
    ENGINE = "engine"
    """An engine that died, is stuck, or refused what is no request of the user's."""
    STOP = "stop"
    """Nothing: somebody asked the job to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Who failed, when, and why."""

    node: int
    rank: int
    """-1 where there are no ranks yet."""
    host: str
    phase: str
    """What the rank was doing: `engine start`, `generate`, `sync`, `train` …"""
    cause: str
    """The error's text, for a person; an engine's holds the last lines of its log."""
    kind: FailureKind = FailureKind.MACHINE
    nodes: tuple[int, ...] = ()
    """Those that are silent, as `grpo launch` counts them: others can take their places."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", _bounded(self.cause))
        object.__setattr__(self, "kind", FailureKind(self.kind))  # text and a list, where it comes out of JSON
        object.__setattr__(self, "nodes", tuple(self.nodes))

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}), rank {self.rank}, phase '{self.phase}': {self.cause}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "nodes": list(self.nodes)}


def _bounded(cause: str) -> str:
    """Its beginning and its end, as far as there is space; without halves of surrogate pairs, which no UTF-8 has."""
    cause = cause.encode(errors="backslashreplace").decode()
    kept, half = cause, MAX_CAUSE // 2
    while len(kept) > MAX_CAUSE + len(_GAP) or len(json.dumps(kept)) > MAX_CAUSE_BYTES:
        kept = cause[:half] + _GAP + cause[-half:]
        half //= 2
    return kept


class GrpoError(RuntimeError):
    """An error that knows its kind."""

    kind = FailureKind.MACHINE

    def __init__(self, text: str, *, kind: FailureKind | None = None) -> None:
        super().__init__(text)
        self.kind = kind or self.kind


class JobFailed(GrpoError):
    """The job failed on some rank; `record` says where and why."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(f"the job failed on {record}", kind=record.kind)
        self.record = record


class StepFailed(JobFailed):
    """This step cannot be finished, but the last one can be saved: the trainer is whole. On every rank at once."""


class GenerationDropped(GrpoError):
    """An engine was lost after a stop had been asked for: nothing more is generated. Raised on every rank at once."""

    kind = FailureKind.STOP

    def __init__(self, why: str) -> None:
        text = f"a stop was asked for ({why}), and an engine is gone: the last finished step is kept [GRPO-612]"
        super().__init__(text)
        self.why = why


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on; each once, for `raise error from error` makes a circle."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


class Decision(StrEnum):
    """What is done about a failure."""

    END = "end"
    """Exit code 1: another start would meet it again."""
    START_AGAIN = "start again"
    """Exit code 85, from the newest complete checkpoint. A crash: `--max-crashes` without a newer one end it."""
    REQUEUE = "requeue"
    """Exit code 85, and no crash is counted."""
    REPLACE_NODE = "replace a node"
    """As `START_AGAIN`; where the job has spare nodes, lost ones are looked for and replaced."""


_END, _START, _REQUEUE, _REPLACE = Decision.END, Decision.START_AGAIN, Decision.REQUEUE, Decision.REPLACE_NODE

ANSWERS: dict[str, tuple[Decision, Decision, Decision]] = {
    # Before the first optimizer step of the job; behind it; behind it, after a crash without a newer checkpoint.
    FailureKind.USER: (_END, _START, _END),
    FailureKind.MEMORY: (_END, _START, _END),
    FailureKind.MACHINE: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.NODE_LOST: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.ENGINE: (_REPLACE, _REPLACE, _REPLACE),
    FailureKind.STOP: (_REQUEUE, _REQUEUE, _REQUEUE),
}


def answer_to(kind: str | None, *, is_behind_first_step: bool, was_seen: bool = False) -> Decision:
    """What is done about a failure.

    Args:
        kind: a `FailureKind`; any other is taken for the machine's.
        is_behind_first_step: of the job; a run that has resumed from a checkpoint is.
        was_seen: whether an attempt before has crashed, and no newer checkpoint was completed since.
    """
    answers = ANSWERS.get(kind or "", ANSWERS[FailureKind.MACHINE])
    return answers[is_behind_first_step + (is_behind_first_step and was_seen)]


def answer_to_end(state: Mapping[str, Any] | None, *, was_seen: bool = False) -> Decision:
    """As `answer_to`, by what `run_state.json` says of an attempt that has not finished; None where it says nothing."""
    state = state or {}
    kind = FailureKind.STOP if state.get("state") == "stopped" else state.get("kind")
    return answer_to(kind, is_behind_first_step=bool(state.get("step")), was_seen=was_seen)
