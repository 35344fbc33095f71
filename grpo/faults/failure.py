"""What a failed job says of itself: one record, and the errors that carry it."""

import json
from dataclasses import asdict, dataclass
from typing import Any

MAX_CAUSE = 16_000  # characters
MAX_CAUSE_BYTES = 100_000  # in JSON, where one may take 12: a record goes from process to process in one packet
_GAP = "\n...\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Who failed, when, and why."""

    node: int
    rank: int
    host: str
    phase: str
    """What the rank was doing: `engine start`, `generate`, `push`, `train` …"""
    cause: str
    """The error's text; an engine's holds the last lines of its log."""
    can_heal: bool = True
    """False for a mistake in what the user wrote, which the next start would meet again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", _bounded(self.cause))

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}), rank {self.rank}, phase '{self.phase}': {self.cause}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _bounded(cause: str) -> str:
    """Its beginning and its end, as far as there is room; without halves of surrogate pairs, which no UTF-8 has."""
    cause = cause.encode(errors="backslashreplace").decode()
    kept, half = cause, MAX_CAUSE // 2
    while len(kept) > MAX_CAUSE + len(_GAP) or len(json.dumps(kept)) > MAX_CAUSE_BYTES:
        kept = cause[:half] + _GAP + cause[-half:]
        half //= 2
    return kept


class JobFailed(RuntimeError):
    """The job failed on some rank; `record` says where and why."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(f"the job failed on {record}")
        self.record = record


class StepFailed(JobFailed):
    """This step cannot be finished, but the last one can be saved: the trainer is whole. On every rank at once."""


class GenerationDropped(RuntimeError):
    """An engine was lost after a stop had been asked for: nothing more is generated. Raised on every rank at once."""

    def __init__(self, why: str) -> None:
        text = f"a stop was asked for ({why}), and an engine is gone: the last finished step is kept [GRPO-612]"
        super().__init__(text)
        self.why = why
