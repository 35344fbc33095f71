"""The events of a trace, by the rules of Chrome's trace format and of Perfetto's importer of it."""

from collections import defaultdict
from pathlib import Path

import pytest

from grpo.ops.trace.events import Event, trace_of
from grpo.record.timeline import records
from grpo.record.timeline.records import AttemptLine, Span, Timeline, Usage, read_timelines
from tests.support.made_runs import FAULTS, RANKS_PER_NODE, MadeRun, make_run

ARGUMENTS_OF = {
    "process_name": {"name"},
    "thread_name": {"name"},
    "process_sort_index": {"sort_index"},
    "thread_sort_index": {"sort_index"},
}


def check_format(events: list[Event]) -> None:
    """What the format asks of every event, and Perfetto's importer of those that it takes."""
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts", "args"} <= event.keys(), event
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "pid", "tid")), event
        assert event["pid"] > 0, "0 is the idle thread"
        assert isinstance(event["name"], str), event
        assert event["name"], event
        match event["ph"]:
            case "M":
                assert event["args"].keys() == ARGUMENTS_OF[event["name"]], event
            case "X":
                assert isinstance(event["dur"], int), event
                assert event["dur"] >= 0, event
                assert event["cat"], event
            case "C":
                assert event["args"], event
                assert all(isinstance(each, int | float) for each in event["args"].values()), event
            case "i":
                assert event["s"] == "p", event
            case other:
                raise AssertionError(f"an event {other}")
    owners = defaultdict(set)
    for event in events:
        owners[event["tid"]].add(event["pid"])
    assert all(len(pids) == 1 for pids in owners.values()), "Perfetto knows a thread by its number alone"


def dropped(events: list[Event]) -> list[Event]:
    """Slices that Perfetto drops: `MaybeCloseStack` of its slice_tracker.cc, on events in the order of their times."""
    stacks: dict[int, list[tuple[int, int]]] = defaultdict(list)
    lost = []
    for event in sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"]):  # stable
        begin, end, stack = event["ts"], event["ts"] + event["dur"], stacks[event["tid"]]
        while stack and stack[-1][1] <= begin and not (stack[-1][0] == stack[-1][1] == begin == end):
            stack.pop()
        if any(begin < outer_end < end for _, outer_end in stack):
            lost.append(event)
        else:
            stack.append((begin, end))
    return lost


def names(events: list[Event], what: str) -> dict[int, str]:
    key = "pid" if what == "process_name" else "tid"
    return {event[key]: event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == what}


def span(lane: str, phase: str, begin: float, end: float, **more) -> Span:
    return Span(attempt=0, lane=lane, phase=phase, begin=begin, end=end, step=0, **more)


def counters(events: list[Event], name: str, series: str) -> list[tuple[int, float]]:
    """Times and values of one counter, in order."""
    return [
        (event["ts"], event["args"][series])
        for event in events
        if event["ph"] == "C" and event["name"] == name and series in event["args"]
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_trace_of_each_fault_draws_all_spans(tmp_path: Path, fault: str) -> None:
    timelines = read_timelines(make_run(tmp_path / "run", MadeRun(steps=24, nodes=3, fault=fault, save_every=9)))
    trace = trace_of(timelines)
    check_format(trace.events)
    assert dropped(trace.events) == []
    assert trace.unreadable == 0
    assert sum(event["ph"] == "X" for event in trace.events) == sum(len(each.spans) for each in timelines)
    assert list(names(trace.events, "process_name").values()) == [f"node {node} (gpu-{node:02})" for node in range(3)]
    threads = names(trace.events, "thread_name")
    lanes = {(event["pid"], threads[event["tid"]]) for event in trace.events if "dur" in event}
    assert {(2, f"rank {RANKS_PER_NODE}"), (2, "engine 0"), (2, "sync"), (2, "sync (2)")} <= lanes
    attempts = [event["name"] for event in trace.events if event["ph"] == "i" and event["pid"] == 1]
    assert attempts == (["attempt 0", "attempt 1"] if fault == "failed" else ["attempt 0"])


def test_check_format_of_malformed_events_raises() -> None:
    good = {"ph": "X", "name": "a", "cat": "a", "pid": 1, "tid": 2, "ts": 0, "dur": 10, "args": {}}
    check_format([good])
    for wrong in ({"dur": -1}, {"ts": 0.5}, {"pid": 0}, {"ph": "Y"}, {"name": ""}):
        with pytest.raises(AssertionError):
            check_format([{**good, **wrong}])
    with pytest.raises(AssertionError, match="by its number"):
        check_format([good, {**good, "pid": 2}])
    assert dropped([good, {**good, "ts": 5, "dur": 5}, {**good, "ts": 10}]) == []
    crossing = {**good, "ts": 5, "dur": 6}
    assert dropped([good, crossing]) == [crossing]


def test_crossing_spans_of_lane_move_to_further_threads() -> None:
    spans = [
        span("save", "outer", 0, 10),
        span("save", "inner", 2, 4),
        span("save", "inner 2", 4, 10),
        span("save", "crosses", 8, 12),
        span("save", "crosses both", 9, 13),
        span("save", "after", 10, 11),
        span("save", "same", 12, 12),
    ]
    events = trace_of([Timeline(0, spans=list(reversed(spans)))]).events
    threads = names(events, "thread_name")
    assert {event["name"]: threads[event["tid"]] for event in events if event["ph"] == "X"} == {
        "outer": "save",
        "inner": "save",
        "inner 2": "save",
        "crosses": "save (2)",
        "crosses both": "save (3)",
        "after": "save",
        "same": "save",
    }
    assert dropped(events) == []
    assert len(dropped([{**event, "tid": 7} for event in events])) == 2


def test_event_times_are_whole_microseconds_since_first() -> None:
    began = 1_790_000_000.0
    spans = [span("rank 0", "a", began + 1.25, began + 1.5), span("rank 0", "b", began + 1.5, began + 1.4999)]
    events = trace_of([Timeline(3, spans=spans), Timeline(5, spans=[span("rank 8", "c", began, began + 1)])]).events
    found = {event["name"]: (event["pid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert found == {"a": (4, 1_250_000, 250_000), "b": (4, 1_500_000, 0), "c": (6, 0, 1_000_000)}


def test_lanes_are_sorted_and_spans_carry_arguments() -> None:
    lanes = ["other", "engine 10", "engine 9", "save", "sync", "rank 8"]
    spans = [span(lane, "a", 0, 1) for lane in lanes]
    known = {"tokens": 300, "requests": 4, "policy_version": 0, "bytes": 7}
    spans += [span("rank 8", records.SCORE, 2, 4, name="accuracy", on_gpu=True, **known)]
    events = trace_of([Timeline(0, spans=spans)]).events
    by_sort_index = {e["args"]["sort_index"]: e["tid"] for e in events if e["name"] == "thread_sort_index"}
    threads = names(events, "thread_name")
    in_order = [threads[by_sort_index[index]] for index in sorted(by_sort_index)]
    assert in_order == ["rank 8", "sync", "save", "engine 9", "engine 10", "other"]
    (scored,) = [event for event in events if event.get("cat") == records.SCORE]
    assert scored["name"] == "score: accuracy"
    said = {"step": 0, "attempt": 0, "tokens_per_s": 150.0, "measured": "on the GPU"}
    assert scored["args"] == {**known, **said}


def test_engine_counters_follow_generate_spans() -> None:
    spans = [
        span("engine 0", records.GENERATE, 0, 10, tokens=1000, requests=64),
        span("engine 0", records.GENERATE, 5, 15, tokens=500, requests=8),
        span("engine 1", records.GENERATE, 5, 15, tokens=300),
        span("rank 0", records.FORWARD, 0, 1, tokens=9, requests=9),
    ]
    events = trace_of([Timeline(0, spans=spans)]).events
    s = 1_000_000
    flight = [(0, 64), (5 * s, 72), (10 * s, 8), (15 * s, 0)]
    assert counters(events, "requests in flight", "engine 0") == flight
    assert counters(events, "requests in flight", "engine 1") == []
    assert counters(events, "tokens/s", "engine 0") == [(0, 100), (5 * s, 150), (10 * s, 50), (15 * s, 0)]
    assert counters(events, "tokens/s", "engine 1") == [(5 * s, 30), (15 * s, 0)]
    assert counters(events, "tokens/s", "rank 0") == []


def test_usage_counters_cover_measured_interval() -> None:
    def usage(time: float, device: str, attempt: int = 0, **seen) -> Usage:
        return Usage(attempt=attempt, time=time, device=device, **seen)

    attempt = AttemptLine(
        attempt=0, node=0, host="a", time=0, ranks=[0], rank_devices=["0"], engine_devices=[["GPU-b"]]
    )
    usages = [
        usage(10, "0", busy=0.5, memory_bytes=2**31, allocated_bytes=2**30, reserved_bytes=3 * 2**29, power_w=310.5),
        usage(20, "0", busy=0.75),
        usage(90, "0", attempt=1, busy=0.25),
        usage(95, "0", attempt=1, busy=1.0),
        usage(10, "GPU-b", memory_bytes=0),
        usage(10, "rank 0", busy=1.5),
        usage(10, "node", memory_bytes=2**34),
    ]
    events = trace_of([Timeline(0, attempts=[attempt], usages=usages)]).events
    s = 1_000_000
    busy = [(10 * s, 50), (10 * s, 75), (20 * s, 0), (90 * s, 25), (90 * s, 100), (95 * s, 0)]
    assert counters(events, "busy %", "GPU 0") == busy
    assert counters(events, "busy %", "rank 0") == [(10 * s, 150)]
    assert counters(events, "memory GiB", "GPU 0") == [(10 * s, 2)]
    assert counters(events, "memory GiB", "GPU GPU-b") == [(10 * s, 0)]
    assert counters(events, "memory GiB", "node") == [(10 * s, 16)]
    assert counters(events, "memory: torch has allocated GiB", "GPU 0") == [(10 * s, 1)]
    assert counters(events, "memory: torch has reserved GiB", "GPU 0") == [(10 * s, 1.5)]
    assert counters(events, "power W", "GPU 0") == [(10 * s, 310.5)]


def test_trace_of_unreadable_lines_counts_them() -> None:
    trace = trace_of([Timeline(0, spans=[span("rank 0", "a", 0, 1)], unreadable=2), Timeline(1, unreadable=3)])
    assert (trace.unreadable, trace.num_spans, trace.num_nodes) == (5, 1, 1)
    assert trace_of([Timeline(0, unreadable=3)]).num_nodes == 0
