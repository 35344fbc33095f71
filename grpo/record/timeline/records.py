"""Records of a timeline and their readers: `timeline/node<k>.jsonl`, one JSON object per line.

    {"kind":"span","attempt":0,"lane":"engine 0","phase":"generate","begin":1764350000.1,"end":1764350004.6,"step":3}

Times are Unix seconds on node 0's clock. A file belongs to one node over all attempts. When it grows too large, its
older half is thinned out, but `AttemptLine` lines are never lost.
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

# Phases of spans. On a rank's lane they are the local main's; it waits wherever the other ranks wait.
START = "start"
GENERATE = "generate"  # engine lanes: from a batch's first request to its last answer; `tokens`, `requests`
WAIT_GENERATE = "wait for generation"
SCORE = "score"  # `name`: the reward function's
OLD_LOGPROBS = "old log-probabilities"
REFERENCE_LOGPROBS = "reference log-probabilities"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
SYNC = "sync"  # a rank's lane: the whole weight sync; its parts overlap, and have lanes of their own
SYNC_GATHER, SYNC_SEND = "weight sync: gather", "weight sync: send and load"
VERIFICATION = "verification"
SAVE = "save"
RESTART = "restart"  # engine lanes: from a death until the engine takes work again
EVALUATE = "evaluate"


def timeline_path(output_dir: Path, node: int) -> Path:
    return output_dir / TIMELINE_FOLDER / f"node{node}.jsonl"


def timeline_files(output_dir: Path) -> dict[int, Path]:
    """Timeline files of all nodes, by node number."""
    paths = (output_dir / TIMELINE_FOLDER).glob("node*.jsonl")
    numbered = ((re.fullmatch(r"node(\d+)\.jsonl", path.name), path) for path in paths)
    return dict(sorted((int(found[1]), path) for found, path in numbered if found))


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Integer that fits a column of the report's tables."""


class _Record:
    """Base of a line; a line with other field types is invalid."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"strict": True, "allow_inf_nan": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLine(_Record):
    """Start of an attempt on a node."""

    kind: ClassVar[str] = "attempt"
    attempt: Whole
    node: Whole
    host: str
    time: float
    clock_offset_s: float = 0.0
    """This node's clock minus node 0's; already subtracted from all times."""
    ranks: list[Whole] = field(default_factory=list)
    """Global ranks of this node; the first is the local main."""
    rank_devices: list[str] = field(default_factory=list)
    """GPUs by their names in the job; empty on CPUs."""
    engine_devices: list[list[str]] = field(default_factory=list)
    """GPUs of each engine; an empty list for an engine on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(_Record):
    """A timed phase."""

    kind: ClassVar[str] = "span"
    attempt: Whole
    lane: str
    """Lane: "rank 8", "engine 0", "weight sync", "save"."""
    phase: str
    """Phase: one of the names above, or a user's."""
    begin: float
    end: float
    step: Whole
    """Optimizer steps finished when it began."""
    name: str = ""
    """Name among several, such as a reward function's."""
    tokens: Whole | None = None
    requests: Whole | None = None
    policy_version: Whole | None = None
    bytes: Whole | None = None
    on_gpu: bool = False
    """Measured between CUDA events: execution on the GPU, not queueing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(_Record):
    """Usage of one of a node's devices at a sample."""

    kind: ClassVar[str] = "usage"
    attempt: Whole
    time: float
    device: str
    """Name of a GPU in the job; "rank 8" or "engine 0" for processes on CPUs; or "node"."""
    busy: float | None = None
    """Share of the time since the last sample: 1 is a whole GPU, or a whole core."""
    memory_bytes: Whole | None = None
    """Memory in use: all of a GPU's; resident memory of a process; memory not available of "node"."""
    memory_total_bytes: Whole | None = None
    allocated_bytes: Whole | None = None
    """Bytes allocated by torch in the local main, on its own GPU."""
    reserved_bytes: Whole | None = None
    power_w: float | None = None


Line = AttemptLine | Span | Usage


def to_line(record: Line) -> str:
    """Format a record as a line; fields at their defaults are left out."""
    said = {each.name: each.default for each in fields(record) if each.default is not MISSING}
    content = {name: value for name, value in asdict(record).items() if name not in said or said[name] != value}
    return json.dumps({"kind": record.kind, **content}, separators=(",", ":"))


def from_line(line: str) -> Line:
    """Parse a line. Fields of later versions are ignored. Raises ValueError or RecursionError for other content."""
    content = json.loads(line)
    named = content.get("kind") if isinstance(content, dict) else None
    for kind in (AttemptLine, Span, Usage):
        if kind.kind == named:
            return from_json(line, kind)
    raise ValueError(f"no line of a timeline: its kind is {named}")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals. An interval that ends before it begins is empty."""
    length, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


@dataclass(slots=True)
class Timeline:
    """Readable timeline of a node."""

    node: int
    attempts: list[AttemptLine] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    unreadable: int = 0
    """Number of invalid lines: cut off, damaged."""


def read_timelines(output_dir: Path) -> list[Timeline]:
    """Read the timelines of all nodes, by node number; an unreadable file counts as one unreadable line."""
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
