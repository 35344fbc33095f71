"""Head of the page: a verdict in one sentence, and the state of the run."""

import time
from dataclasses import dataclass

from grpo.ops import windows
from grpo.ops.report import shares
from grpo.ops.report.advice import Advice, Figures, advice_for, count_deaths, is_judged, percent
from grpo.ops.report.reading import AttemptRecord, Run

MANY_S = 600  # a running job without a log for this long, and for ten steps, may hang


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One figure at the head of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Verdict, advice and main figures of a run."""

    sentence: str
    is_good: bool
    advice: tuple[Advice, ...]
    tiles: tuple[Tile, ...]


def verdict_of(figures: Figures) -> Headline:
    advice = advice_for(figures)
    trouble = trouble_of(figures.run)
    said = [*([trouble] if trouble else []), *(f"{each.finding}: {each.do}" for each in advice[:2])]
    more = len(advice) - 2
    if more > 0:
        said.append(f"{more} more below")
    text = "; ".join(said) or _all_well(figures)
    return Headline(
        sentence=f"{text[:1].upper()}{text[1:]}.",
        is_good=not said,
        advice=tuple(advice),
        tiles=tuple(tiles_of(figures)),
    )


def _all_well(figures: Figures) -> str:
    if not figures.run.step:
        return "no step is done yet"
    if not is_judged(figures):
        return f"{figures.run.step} step{'s' * (figures.run.step > 1)} are too few to advise by"
    run, idle, wait = figures.run, percent(figures.idle_share), percent(figures.wait_share)
    said = {"engine/idle_share": f"engines idle {idle}", "rollout/wait_share": f"ranks wait {wait}"}
    seen = ", ".join(words for name, words in said.items() if run.metrics.get(name) is not None)
    why = "" if run.settings.topology.get("has_gpus", True) else "; without GPUs they take turns on the same cores"
    return "nothing to change was found" + (f": {seen}{why}" if seen else "")


def trouble_of(run: Run) -> str:
    """Describe a failed end of the run, or failures in training on the way; '' without any. Failed starts that were
    mended are in a tile."""
    failed = [each for each in run.attempts if each.state == "failed" and each.has_trained]
    if run.state == "failed":
        return f"the run failed{_where(run.last)} {f'after {run.step} steps' if run.step else 'before its first step'}"
    if failed:
        return f"{len(failed)} of {len(run.attempts)} attempts failed in training{_where(failed[-1])}"
    silent = silent_s(run)
    if silent:
        return f"no step was logged for {duration(silent)}, although the run is said to go on"
    return ""


def _where(attempt: AttemptRecord) -> str:
    record = attempt.failure
    return f" on node {record.node} in the phase '{record.phase}'" if record else ""


def silent_s(run: Run) -> float:
    """Seconds since the last log of a running job; 0 if it is recent."""
    taken, times = shares.step_s(run), run.metrics.times
    if run.state != "running" or not taken or not len(times) or not times[-1] > 0:
        return 0.0
    silent = time.time() - float(times[-1])
    return silent if silent > max(MANY_S, 10 * taken) else 0.0


def tiles_of(figures: Figures) -> list[Tile]:
    run = figures.run
    wanted, left, taken = shares.total_steps(run), shares.left_s(run), shares.step_s(run)
    tiles = [Tile(label="State", value=run.state or "not known", note=_state_note(run))]
    of = f"of {wanted:,}" if wanted else ""
    tiles.append(Tile(label="Steps", value=f"{run.step:,}", note=of))
    if left is not None:
        tiles.append(Tile(label="Time left", value=duration(left), note="at the present speed"))
    if taken is not None:
        tiles.append(Tile(label="Step time", value=duration(taken), note=f"median of the last {shares.RECENT_LOGS}"))
    tokens = shares.mean(run, "rollout/tokens_per_s", shares.RECENT_LOGS)
    if tokens is not None:
        note = f"sampled, {run.num_nodes} node{'s' * (run.num_nodes > 1)}"
        tiles.append(Tile(label="Tokens/s", value=f"{tokens * run.num_nodes:,.0f}", note=note))
    throughput = shares.tokens_per_gpu(run)
    if throughput is not None:
        of = "GPU, ranks' and engines'" if run.settings.topology.get("has_gpus") else "process, ranks and engines"
        tiles.append(Tile(label="Throughput", value=f"{throughput:,.0f} tokens/s", note=f"trained on, per {of}"))
    reward = shares.ends(run, "reward")
    if reward is not None:
        first, last = windows(int(run.metrics.steps[-1]))
        note = f"mean of the first {first} and the last {last} steps"
        tiles.append(Tile(label="Reward", value=f"{reward[0]:.3f} → {reward[1]:.3f}", note=note))
    tiles.append(Tile(label="Attempts", value=str(len(run.attempts)) if run.attempts else "?"))
    failed = [each for each in run.attempts if each.failure is not None or each.state == "failed"]
    failures = len(failed) or int(run.state == "failed")
    starts, died = sum(not each.has_trained for each in failed), count_deaths(run)
    notes = [f"{starts} before the first step"] * (starts > 0) + [f"engines died and came back: {died}"] * (died > 0)
    value = str(failures) if run.attempts or failures else "?"
    tiles.append(Tile(label="Failures", value=value, note="; ".join(notes)))
    return tiles


def _state_note(run: Run) -> str:
    began = next((each.started for each in run.attempts if each.started), None)
    ended = run.last.ended or (float(run.metrics.times[-1]) if len(run.metrics.times) else None)
    if began is None or ended is None or not ended > began:
        return ""
    return f"{'after' if run.has_ended else 'for'} {duration(ended - began)}"


def duration(seconds: float) -> str:
    """Format seconds in at most two units."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
