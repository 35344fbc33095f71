"""Timelines as events of Chrome's trace format, as read by Perfetto.

Format: "Trace Event Format" (Google, 2016). Perfetto adds two rules: complete events ("X") of one thread must be nested
or disjoint, else the later one is dropped; each argument of a counter is a counter of its own. Processes are nodes,
threads are lanes. Times are whole microseconds since the run began.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.record.timeline.records import GENERATE, Span, Timeline, Usage

Event = dict[str, Any]

LANES = ("rank", "sync", "save", "engine")  # order on the screen; others come after them
THREADS_PER_NODE = 1000  # thread numbers are unique over nodes: Perfetto identifies a thread by its number only
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Events of the trace file, and the number of unreadable lines."""

    events: list[Event] = field(default_factory=list)
    """Metadata first, then by time; among events with the same start the longest first."""
    began: float = 0.0
    """Unix seconds of time 0 of the events."""
    unreadable: int = 0
    """Damaged lines."""
    num_spans: int = 0
    num_nodes: int = 0


def trace_of(timelines: Sequence[Timeline]) -> Trace:
    """Convert the timelines of all nodes. `num_nodes` is 0 without any readable record."""
    unreadable = sum(each.unreadable for each in timelines)
    usable = [each for each in timelines if each.attempts or each.spans or each.usages]
    if not usable:
        return Trace(unreadable=unreadable)
    events: list[Event] = []
    for timeline in usable:
        pid = timeline.node + 1  # 0 is the kernel's idle thread to Perfetto
        events += [{"pid": pid, "tid": pid, **event} for event in _node_events(timeline)]
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0)))
    began = next((event["ts"] for event in events if event["ph"] != "M"), 0)
    for event in events:
        event["ts"] = max(0, event["ts"] - began)  # metadata has 0
    return Trace(
        events=events,
        began=began / 1e6,
        unreadable=unreadable,
        num_spans=sum(len(each.spans) for each in usable),
        num_nodes=len(usable),
    )


def _microseconds(time: float) -> int:
    return round(time * 1e6)


def _node_events(timeline: Timeline) -> Iterator[Event]:
    host = next((each.host for each in reversed(timeline.attempts)), "")
    yield _metadata("process_name", name=f"node {timeline.node}" + (f" ({host})" if host else ""))
    yield _metadata("process_sort_index", sort_index=timeline.node)
    for attempt in timeline.attempts:
        yield {
            "ph": "i",
            "s": "p",
            "name": f"attempt {attempt.attempt}",
            "cat": "attempt",
            "ts": _microseconds(attempt.time),
            "args": {"host": attempt.host, "clock_offset_s": attempt.clock_offset_s, "ranks": attempt.ranks},
        }
    yield from _lane_events(timeline)
    yield from _work_counters(timeline.spans)
    yield from _usage_counters(timeline)


def _metadata(what: str, **args: Any) -> Event:
    return {"ph": "M", "name": what, "ts": 0, "args": args}


# -- spans ----------------------------------------------------------------------------------------------------------


def _lane_events(timeline: Timeline) -> Iterator[Event]:
    by_lane: dict[str, list[Event]] = {}
    for span in timeline.spans:
        by_lane.setdefault(span.lane, []).append(_complete(span))
    tid = (timeline.node + 1) * THREADS_PER_NODE
    for lane in sorted(by_lane, key=_lane_order):
        for number, events in enumerate(_threads(by_lane[lane])):
            tid += 1
            name = lane if number == 0 else f"{lane} ({number + 1})"
            named = [_metadata("thread_name", name=name), _metadata("thread_sort_index", sort_index=tid)]
            yield from ({**event, "tid": tid} for event in [*named, *events])


def _lane_order(lane: str) -> tuple[int, str, int]:
    kind, _, number = lane.partition(" ")
    return LANES.index(kind) if kind in LANES else len(LANES), kind, int(number) if number.isdigit() else 0


def _complete(span: Span) -> Event:
    begin, end = _microseconds(span.begin), _microseconds(span.end)
    known = {name: getattr(span, name) for name in ("tokens", "requests", "policy_version", "bytes")}
    args: dict[str, Any] = {"step": span.step, "attempt": span.attempt}
    args |= {name: value for name, value in known.items() if value is not None}
    if (rate := _tokens_per_s(span)) is not None:
        args["tokens_per_s"] = round(rate, 1)
    if span.on_gpu:
        args["measured"] = "on the GPU"
    return {
        "ph": "X",
        "name": f"{span.phase}: {span.name}" if span.name else span.phase,
        "cat": span.phase,
        "ts": begin,
        "dur": max(0, end - begin),  # two clocks may differ slightly
        "args": args,
    }


def _threads(events: list[Event]) -> list[list[Event]]:
    """Split the events of a lane into threads, so that on each one events are nested or disjoint."""
    threads: list[tuple[list[Event], list[int]]] = []  # and the ends of the open events, the outermost first
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        for thread, ends in threads:
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                thread.append(event)
                ends.append(end)
                break
        else:
            threads.append(([event], [end]))
    return [thread for thread, _ in threads]


# -- counters -------------------------------------------------------------------------------------------------------


def _counter(name: str, ts: int, series: str, value: float) -> Event:
    return {"ph": "C", "name": name, "cat": "counter", "ts": ts, "args": {series: value}}


def _tokens_per_s(span: Span) -> float | None:
    return span.tokens / (span.end - span.begin) if span.tokens is not None and span.end > span.begin else None


def _work_counters(spans: list[Span]) -> Iterator[Event]:
    """Counters of each engine from its generation batches: requests in flight, and tokens/s as the mean of each
    batch."""
    batches = [span for span in spans if span.phase == GENERATE]
    for name, values in (
        ("requests in flight", [(span, span.requests) for span in batches]),
        ("tokens/s", [(span, _tokens_per_s(span)) for span in batches]),
    ):
        changes: dict[str, dict[int, float]] = {}
        for span, value in values:
            if value is not None:
                at = changes.setdefault(span.lane, {})
                begin, end = _microseconds(span.begin), _microseconds(span.end)
                at[begin] = at.get(begin, 0) + value
                at[max(begin, end)] = at.get(max(begin, end), 0) - value
        for lane, at in changes.items():
            total = 0.0
            for ts in sorted(at):
                total += at[ts]
                yield _counter(name, ts, lane, round(total, 1))


def _usage_counters(timeline: Timeline) -> Iterator[Event]:
    gpus = {name for each in timeline.attempts for names in (each.rank_devices, *each.engine_devices) for name in names}
    by_device: dict[tuple[str, int], list[Usage]] = {}
    for usage in timeline.usages:
        series = f"GPU {usage.device}" if usage.device in gpus else usage.device
        by_device.setdefault((series, usage.attempt), []).append(usage)
    for (series, _), samples in by_device.items():
        samples.sort(key=lambda each: each.time)
        since = samples[0].time
        for usage in samples:
            ts = _microseconds(usage.time)
            for name, value, unit in (
                ("memory GiB", usage.memory_bytes, GIB),
                ("memory: torch has allocated GiB", usage.allocated_bytes, GIB),
                ("memory: torch has reserved GiB", usage.reserved_bytes, GIB),
                ("power W", usage.power_w, 1),
            ):
                if value is not None:
                    yield _counter(name, ts, series, round(value / unit, 3))
            if usage.busy is not None:
                # Usage is a share of the time before, a counter holds for the time after; so the attempt's last one is
                # 0.
                yield _counter("busy %", _microseconds(since), series, round(100 * usage.busy, 1))
                since = usage.time
        if since > samples[0].time:
            yield _counter("busy %", _microseconds(since), series, 0)
