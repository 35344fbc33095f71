"""Timelines of all nodes as arrays. A run of 10,000 steps on 8 nodes has more than a million lines, so Arrow reads
them. If Arrow rejects a file, it is read line by line; damaged lines are skipped and counted."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from grpo.record.timeline.records import AttemptLine, Span, Usage, from_line, timeline_files, to_line

BLOCK_BYTES = 2**23
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("attempt", pa.int64()),
        ("lane", pa.string()),
        ("phase", pa.string()),
        ("name", pa.string()),
        ("begin", pa.float64()),
        ("end", pa.float64()),
        ("step", pa.int64()),
        ("time", pa.float64()),
        ("device", pa.string()),
        ("busy", pa.float64()),
        ("memory_bytes", pa.float64()),
        ("memory_total_bytes", pa.float64()),
        ("engine_devices", pa.list_(pa.list_(pa.string()))),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans as arrays of one length, P."""

    node: np.ndarray  # [P] int64
    attempt: np.ndarray  # [P] int64
    lane: np.ndarray  # [P] index into `lanes`
    phase: np.ndarray  # [P] index into `phases`
    name: np.ndarray  # [P] index into `names`
    step: np.ndarray  # [P] int64
    begin: np.ndarray  # [P] float64, Unix seconds
    end: np.ndarray  # [P] float64
    lanes: tuple[str, ...]
    phases: tuple[str, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.node)

    def in_lanes(self, kind: str) -> np.ndarray:
        """[P] bool: True for spans in lanes that begin with `kind`, "rank " or "engine "."""
        return np.isin(self.lane, [index for index, lane in enumerate(self.lanes) if lane.startswith(kind)])

    def in_phases(self, *phases: str) -> np.ndarray:
        """[P] bool: True for spans of these phases."""
        return np.isin(self.phase, [index for index, phase in enumerate(self.phases) if phase in phases])


@dataclass(frozen=True, slots=True, kw_only=True)
class Usages:
    """Use of devices, as arrays of one length, U."""

    node: np.ndarray  # [U] int64
    time: np.ndarray  # [U] float64, Unix seconds
    is_engine: np.ndarray  # [U] bool: an engine's device; else a rank's
    busy: np.ndarray  # [U] float64, share; nan if not measured
    memory_bytes: np.ndarray  # [U] float64
    memory_total_bytes: np.ndarray  # [U] float64

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineArrays:
    """Spans and device usage of all nodes."""

    spans: Spans
    usages: Usages

    def numbered_by(self, begins: list[float]) -> "TimelineArrays":
        """Number the attempts of spans by their start times, in Unix seconds: a second job in the same folder counts
        from 0 again."""
        numbers = np.searchsorted(begins, self.spans.end, side="right") - 1
        return replace(self, spans=replace(self.spans, attempt=numbers))


def read_timelines(folder: Path, num_nodes: int, missing: list[str], *, is_running: bool = False) -> TimelineArrays:
    """Read all of `timeline/`; missing or damaged parts get a line in `missing`."""
    files = timeline_files(folder)
    absent = [f"node{node}.jsonl" for node in range(num_nodes) if node not in files]
    if not files:
        missing.append("timeline/ holds no file: no timeline, no parts of a step, no use of devices")
    elif absent:
        missing.append(f"timeline/ lacks {', '.join(absent)}: those nodes have no timeline")
    tables = []
    for node, path in files.items():
        table = _read_file(path, missing, is_running=is_running)
        tables.append(table.append_column("node", pa.array(np.full(table.num_rows, node))))
    whole = pa.concat_tables(tables) if tables else SCHEMA.append(pa.field("node", pa.int64())).empty_table()
    engines = {
        (row["node"], name)
        for row in _of_kind(whole, AttemptLine).to_pylist()
        for devices in row["engine_devices"] or []
        for name in devices
    }
    return TimelineArrays(spans=_spans(_of_kind(whole, Span)), usages=_usages(_of_kind(whole, Usage), engines))


def _of_kind(whole: pa.Table, kind: type[Any]) -> pa.Table:
    """Rows of one kind, with the columns of this kind."""
    columns = [name for name in whole.column_names if name in kind.__dataclass_fields__ or name == "node"]
    return whole.select(columns).filter(pc.equal(whole["kind"], kind.kind))


def _read_file(path: Path, missing: list[str], *, is_running: bool) -> pa.Table:
    name = f"timeline/{path.name}"
    try:
        content = path.read_bytes()
    except OSError as error:
        missing.append(f"{name} cannot be read ({error.strerror})")
        return SCHEMA.empty_table()
    whole, newline, rest = content.rpartition(b"\n")
    if rest and not is_running:  # while it runs, the last line is still being written
        missing.append(f"{name}: the last line is cut off")
    if not whole.strip():
        if not rest:
            missing.append(f"{name} is empty")
        return SCHEMA.empty_table()
    try:
        return _parse(whole + newline)
    except pa.ArrowInvalid:
        kept, unread = _whole_lines(whole)
        missing.append(f"{name}: {unread} line{'s' * (unread != 1)} cannot be read (damaged)")
        return _parse(kept) if kept else SCHEMA.empty_table()


def _parse(content: bytes) -> pa.Table:
    """Parse lines of JSON.

    Raises:
        ArrowInvalid: a line is not JSON, or a field has another type.
    """
    table = pj.read_json(
        pa.BufferReader(content),
        read_options=pj.ReadOptions(block_size=max(BLOCK_BYTES, 1 + max(map(len, content[:BLOCK_BYTES].split(b"\n"))))),
        parse_options=pj.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore"),
    )
    return table.select(SCHEMA.names)


def _whole_lines(content: bytes) -> tuple[bytes, int]:
    """Return the valid lines, and the number of damaged ones."""
    kept, unread = [], 0
    for line in content.decode(errors="replace").splitlines():
        try:
            kept.append(to_line(from_line(line)).encode())
        except (ValueError, RecursionError):
            unread += bool(line.strip())
    return b"".join(line + b"\n" for line in kept), unread


def _numbers(table: pa.Table, name: str, fill: float = np.nan) -> np.ndarray:
    return table[name].fill_null(fill).to_numpy()


def _words(table: pa.Table, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return indices, and the words they refer to."""
    encoded = pc.dictionary_encode(table[name].fill_null("")).combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False), tuple(encoded.dictionary.to_pylist())


def _spans(table: pa.Table) -> Spans:
    usable = pc.and_(pc.is_finite(table["begin"]), pc.greater_equal(table["end"], table["begin"]))
    table = table.filter(pc.and_kleene(usable, pc.is_finite(table["end"])))
    (lane, lanes), (phase, phases), (name, names) = (_words(table, each) for each in ("lane", "phase", "name"))
    return Spans(
        node=_numbers(table, "node", 0),
        attempt=_numbers(table, "attempt", 0),
        step=_numbers(table, "step", 0),
        begin=_numbers(table, "begin"),
        end=_numbers(table, "end"),
        lane=lane,
        phase=phase,
        name=name,
        lanes=lanes,
        phases=phases,
        names=names,
    )


def _usages(table: pa.Table, engines: set[tuple[int, str]]) -> Usages:
    """Return the usage of ranks' and engines' devices; those of "node" are left out.

    Args:
        engines: (node, device) of engines' devices.
    """
    device, devices = _words(table, "device")
    node = _numbers(table, "node", 0)
    is_engine = np.zeros(len(node), dtype=bool)
    for index, name in enumerate(devices):
        nodes = [number for number, each in engines if each == name]
        is_engine |= (device == index) & (name.startswith("engine ") | np.isin(node, nodes))
    keep = np.isin(device, [index for index, name in enumerate(devices) if name != "node"])
    columns = {name: _numbers(table, name)[keep] for name in ("time", "busy", "memory_bytes", "memory_total_bytes")}
    return Usages(node=node[keep], is_engine=is_engine[keep], **columns)
