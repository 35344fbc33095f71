"""`grpo plan --from-run RUN`: how many GPUs to reserve, by what engines and ranks of a run were doing."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo.ops.plan.reserve import best_reserved
from grpo.record.timeline.records import (
    GENERATE,
    START,
    WAIT_GENERATE,
    Attempt,
    Span,
    Timeline,
    covered,
    read_timelines,
)

FIRST_STEPS = 2  # of an attempt: kernels are compiled, caches are filled
STEPS = 50  # the last ones: lengths change while a model learns
OVERLAPS = 0.2  # of the time in which engines sample: more than this beside the ranks' own work is meant


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one node and one step. Engines' time falls with the GPUs that they have, and the ranks' with theirs: a line
    through what was seen, which two engines, or more sequences at once on one, do not follow exactly."""

    gpus: int
    """Of the node: those of ranks and engines."""
    reserved: int
    generate_s: float
    """Of its engines, with `reserved` GPUs."""
    train_s: float
    """Of its ranks, with the others; all that is not waiting for completions."""

    def step_s(self, reserved: int) -> float:
        """With so many GPUs reserved, and both at work at the same time."""
        generate = self.generate_s * self.reserved / reserved
        return max(generate, self.train_s * (self.gpus - self.reserved) / (self.gpus - reserved))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAdvice:
    """What a run's timeline says of its placement."""

    attempt: int
    steps: int
    """That were looked at: the last ones."""
    gpus_per_node: int
    reserved: int
    """GPUs of each node that engines have."""
    engines_busy: float
    """Share of the time in which they sampled: mean over engines."""
    ranks_waited: float
    """Share of the time in which ranks waited for completions: mean over nodes."""
    overlapped: bool
    """Whether engines sampled while ranks trained (`generation_lookahead`)."""
    reserve: int
    """What would be better, or `reserved` again; with engines and ranks at work at the same time."""
    faster: float
    """By how much steps would get shorter with it: a share of their time."""
    num_processes: int
    """To write with it, for all nodes."""

    def line(self) -> str:
        """In one line for people."""
        seen = f"engines were busy {100 * self.engines_busy:.0f} %, ranks waited {100 * self.ranks_waited:.0f} %"
        seen += f" (the last {self.steps} steps of attempt {self.attempt})"
        move = f"reserve {self.reserve} {'GPU' if self.reserve == 1 else 'GPUs'} a node (num_processes: "
        move += f"{self.num_processes})"
        if not self.overlapped:
            then = "" if self.reserve == self.reserved else f"; then {move}"
            return f"set generation_lookahead to 1 first: {seen}, one after the other{then}"
        if self.reserve == self.reserved:
            return f"as it is, {self.reserved} of {self.gpus_per_node} GPUs reserved: {seen}"
        return f"{move}: {seen}; by this a step would take {100 - 100 * self.faster:.0f} % of its time"


def advice_of(output_dir: Path) -> RunAdvice:
    """By the last attempt that has steps enough.

    Raises:
        ValueError: the folder has no timeline, or none with GPUs and with steps enough.
    """
    timelines = read_timelines(output_dir)
    if not timelines:
        raise ValueError(
            f"--from-run {output_dir}: there is no timeline in it (timeline/node0.jsonl): name a run's output_dir"
        )
    attempts = sorted(
        {span.attempt for node in timelines for span in node.spans if span.phase == GENERATE}, reverse=True
    )
    for attempt in attempts:
        if (window := _window(timelines[0].spans, attempt)) is not None:
            return _advice(output_dir, timelines, attempt, *window)
    raise ValueError(
        f"--from-run {output_dir}: no attempt has {FIRST_STEPS + 1} finished steps, the first {FIRST_STEPS} left out: "
        "let it run on"
    )


def _window(spans: Sequence[Span], attempt: int) -> tuple[int, float, float] | None:
    """(steps, begin, end) of what is looked at; None where an attempt has too few steps.

    The last step that was begun may not be whole: it is left out.
    """
    begins: dict[int, float] = {}
    for span in spans:
        if span.attempt == attempt and span.phase != START and span.lane.startswith("rank"):
            begins[span.step] = min(begins.get(span.step, span.begin), span.begin)
    steps = sorted(begins)[FIRST_STEPS:]
    gaps = [at for at in range(1, len(steps)) if steps[at] - steps[at - 1] > 1]  # a long timeline is thinned out
    steps = steps[gaps[-1] if gaps else 0 :][-STEPS - 1 :]
    if len(steps) < 2:
        return None
    return len(steps) - 1, begins[steps[0]], begins[steps[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What one node was doing."""

    ranks: int
    engines: tuple[int, ...]
    """GPUs of each."""
    busy: tuple[float, ...]
    """Of each engine: share of the time in which it sampled."""
    beside: tuple[float, ...]
    """Of each engine: share of that in which the ranks did not wait for it."""
    waited: float


def _seen(node: Timeline, record: Attempt, begin: float, end: float) -> _Seen:
    spans = [span for span in node.spans if span.attempt == record.attempt]
    waits = [each for each in spans if each.phase == WAIT_GENERATE]
    waited_s = _covered_s(waits, begin, end)
    busy, beside = [], []
    for number in range(len(record.engine_devices)):
        lane = [each for each in spans if each.phase == GENERATE and each.lane == f"engine {number}"]
        sampled_s = _covered_s(lane, begin, end)
        beside_s = _covered_s(lane + waits, begin, end) - waited_s
        busy.append(sampled_s / (end - begin))
        beside.append(beside_s / sampled_s if sampled_s else 0.0)
    return _Seen(
        ranks=len(record.ranks),
        engines=tuple(len(devices) for devices in record.engine_devices),
        busy=tuple(busy),
        beside=tuple(beside),
        waited=waited_s / (end - begin),
    )


def _advice(
    output_dir: Path, timelines: Sequence[Timeline], attempt: int, steps: int, begin: float, end: float
) -> RunAdvice:
    records = [(node, each) for node in timelines for each in node.attempts if each.attempt == attempt]
    seen = [_seen(node, record, begin, end) for node, record in records]
    placements = {(each.ranks, each.engines) for each in seen}
    if len(placements) != 1 or not sum(seen[0].engines):
        raise ValueError(
            f"--from-run {output_dir}: its nodes have {'no GPUs' if len(placements) == 1 else 'different placements'}, "
            "and advice is for GPUs that all nodes reserve alike"
        )
    reserved, step_s = sum(seen[0].engines), (end - begin) / steps
    busy = fmean(share for each in seen for share in each.busy)
    waited = fmean(each.waited for each in seen)
    beside = fmean(share for each in seen for share in each.beside)
    work = Work(
        gpus=seen[0].ranks + reserved, reserved=reserved, generate_s=busy * step_s, train_s=(1 - waited) * step_s
    )
    engine = seen[0].engines[0]
    best = best_reserved(work.step_s, reserved=reserved, choices=range(engine, work.gpus, engine))
    asked = _lookahead(output_dir, attempt)
    return RunAdvice(
        attempt=attempt,
        steps=steps,
        gpus_per_node=work.gpus,
        reserved=reserved,
        engines_busy=busy,
        ranks_waited=waited,
        overlapped=bool(asked) if asked is not None else beside > OVERLAPS,
        reserve=best,
        faster=1 - work.step_s(best) / work.step_s(reserved),
        num_processes=(work.gpus - best) * len(seen),
    )


def _lookahead(output_dir: Path, attempt: int) -> int | None:
    """`generation_lookahead` as run.json has it; None where that cannot be read."""
    try:
        attempts: list[dict[str, Any]] = json.loads((output_dir / "run.json").read_text())["attempts"]
        return next(int(each["arguments"]["generation_lookahead"]) for each in attempts if each["attempt"] == attempt)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


def _covered_s(spans: Iterable[Span], begin: float, end: float) -> float:
    """How much of the time from `begin` to `end` lies in at least one of the spans."""
    return covered((max(span.begin, begin), min(span.end, end)) for span in spans)
