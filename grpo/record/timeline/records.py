"""The lines of a timeline, and how they are read: `timeline/node<k>.jsonl`, one JSON object a line.

Times are Unix seconds on node 0's clock. A file belongs to one node over all attempts; when it has grown too large, its
older half is thinned out, and an `AttemptLine` line is never lost.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from grpo.place.wire import from_json
from grpo.record.files import TIMELINE_FOLDER

# What spans are called. Of a rank's lane: what the local main does; it waits with the others wherever it waits.
START = "start"
GENERATE = "generate"  # engine lanes: from a batch's first request to its last answer; `tokens`, `requests`
WAIT_GENERATE = "wait for generation"
SCORE = "score"  # `name`: the reward function's
OLD_LOGPROBS = "old log-probabilities"
REFERENCE_LOGPROBS = "reference log-probabilities"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
SYNC = "sync"  # a rank's lane: all of it; its parts on lanes of their own, for they overlap
SYNC_GATHER, SYNC_SEND = "weight sync: gather", "weight sync: send and load"
VERIFICATION = "verification"
SAVE = "save"
RESTART = "restart"  # engine lanes: from a death until the engine takes work again
EVALUATE = "evaluate"


def timeline_path(output_dir: Path, node: int) -> Path:
    return output_dir / TIMELINE_FOLDER / f"node{node}.jsonl"


def timeline_files(output_dir: Path) -> dict[int, Path]:
    """What `timeline_path` has named, of every node that has left one, in their order."""
    paths = (output_dir / TIMELINE_FOLDER).glob("node*.jsonl")
    numbered = ((re.fullmatch(r"node(\d+)\.jsonl", path.name), path) for path in paths)
    return dict(sorted((int(found[1]), path) for found, path in numbered if found))


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What a column of the report's tables holds."""


class _Record:
    """A line: one whose fields are of other types than they are here is none."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "allow_inf_nan": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLine(_Record):
    """A node begins an attempt."""

    kind: ClassVar[str] = "attempt"
    attempt: Whole
    node: Whole
    host: str
    time: float
    clock_offset_s: float = 0.0
    """This node's clock minus node 0's; it is already taken out of all times."""
    ranks: list[Whole] = field(default_factory=list)
    """Global ranks of this node; the first is the local main."""
    rank_devices: list[str] = field(default_factory=list)
    """GPUs by the names that the job sees; empty on CPUs."""
    engine_devices: list[list[str]] = field(default_factory=list)
    """For each engine its GPUs; an empty list for an engine on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(_Record):
    """Something that took time."""

    kind: ClassVar[str] = "span"
    attempt: Whole
    lane: str
    """"rank 8", "engine 0", "weight sync", "save"."""
    phase: str
    """One of the names above, or the user's."""
    begin: float
    end: float
    step: Whole
    """Optimizer steps that were done when it began."""
    name: str = ""
    """Which of several: a reward function."""
    tokens: Whole | None = None
    requests: Whole | None = None
    policy_version: Whole | None = None
    bytes: Whole | None = None
    on_gpu: bool = False
    """Measured between CUDA events: when the GPU did it, not when it was queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(_Record):
    """What a node's devices were doing, as a sampling thread saw it."""

    kind: ClassVar[str] = "usage"
    attempt: Whole
    time: float
    device: str
    """A GPU's name in the job, or "rank 8", "engine 0" for processes on CPUs, or "node"."""
    busy: float | None = None
    """Share of the time since the sample before: 1 is a whole GPU, or a whole core."""
    memory_bytes: Whole | None = None
    """Of a GPU all that is in use; of a process what is resident; of "node" what is not available."""
    memory_total_bytes: Whole | None = None
    allocated_bytes: Whole | None = None
    """By torch in the local main, on its own GPU."""
    reserved_bytes: Whole | None = None
    power_w: float | None = None


Line = AttemptLine | Span | Usage


def to_line(record: Line) -> str:
    """Fields that have their default are left out."""
    said = {each.name: each.default for each in fields(record) if each.default is not MISSING}
    content = {name: value for name, value in asdict(record).items() if name not in said or said[name] != value}
    return json.dumps({"kind": record.kind, **content}, separators=(",", ":"))


def from_line(line: str) -> Line:
    """Raises ValueError, RecursionError: not a line of a timeline. Fields of later versions are left out."""
    content = json.loads(line)
    named = content.get("kind") if isinstance(content, dict) else None
    for kind in (AttemptLine, Span, Usage):
        if kind.kind == named:
            return from_json(line, kind)
    raise ValueError(f"no line of a timeline: its kind is {named}")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of the time lies in at least one of them. One that ends before it begins is empty."""
    length, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


@dataclass(slots=True)
class Timeline:
    """A node's, as far as it can be read."""

    node: int
    attempts: list[AttemptLine] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are no lines of a timeline: cut off, damaged."""


def read_timelines(output_dir: Path) -> list[Timeline]:
    """Of all nodes that have left one, in their order; files that cannot be opened count as one unreadable line."""
    return [_read(node, path) for node, path in timeline_files(output_dir).items()]


def _read(node: int, path: Path) -> Timeline:
    found = Timeline(node)
    records: dict[type, list] = {AttemptLine: found.attempts, Span: found.spans, Usage: found.usages}
    try:
        text = path.read_text(errors="replace")
    except OSError:
        found.unreadable = 1
        return found
    for line in text.splitlines():
        try:
            record = from_line(line)
        except (ValueError, RecursionError):
            found.unreadable += 1
        else:
            records[type(record)].append(record)
    return found
