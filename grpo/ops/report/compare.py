"""Comparison of two to eight runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.ops.report import shares
from grpo.ops.report.charts import COLOURS, Mark, numbers
from grpo.ops.report.curves import Multiples
from grpo.ops.report.reading import Run
from grpo.ops.report.thinning import bins_of

MAX_RUNS = len(COLOURS)
END_LOGS = 20
CURVES = (
    ("Reward", "reward", "reward"),
    ("Groups with zero std", "share", "frac_reward_zero_std"),
    ("Entropy", "nats", "entropy"),
    ("KL to the reference", "nats", "kl"),
    ("Completion length, mean", "tokens", "completions/mean_length"),
    ("Completions, truncated", "share", "completions/clipped_ratio"),
    ("Gradient norm", "norm", "grad_norm"),
    ("Engine against trainer", "nats", "weight_sync/logprob_gap_mean"),
    ("Step time", "s", "step_time"),
    ("Generation, mean of the nodes", "s", "rollout/generate_s"),
    ("Tokens/s of a node", "tokens/s", "rollout/tokens_per_s"),
    ("Ranks wait for engines", "share", "rollout/wait_share"),
    ("Engines idle", "share", "engine/idle_share"),
    ("Weight sync", "s", "weight_sync/total_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run in the table of runs."""

    run: Run
    colour: str
    step_s: float | None
    tokens_per_s: float | None
    wait_share: float | None
    idle_share: float | None
    reward: float | None
    """Mean of the last logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Contents of a page of several runs."""

    sentence: str
    runs: tuple[Compared, ...]
    curves: Multiples
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    """Name, and its value in each run, of differing settings, versions and topology."""


def compare(runs: Sequence[Run]) -> Comparison:
    compared = tuple(
        Compared(
            run=run,
            colour=COLOURS[number],
            step_s=shares.step_s(run),
            tokens_per_s=shares.mean(run, "rollout/tokens_per_s"),
            wait_share=shares.mean(run, "rollout/wait_share"),
            idle_share=shares.mean(run, "engine/idle_share"),
            reward=shares.mean(run, "reward", END_LOGS),
        )
        for number, run in enumerate(runs)
    )
    return Comparison(
        sentence=sentence_of(compared),
        runs=compared,
        curves=curves_of(compared),
        settings=differing([flat(run) for run in runs]),
    )


def sentence_of(compared: Sequence[Compared]) -> str:
    """Name the fastest run, and the reward of each at the last step reached by all."""
    said = []
    timed = sorted((each for each in compared if each.step_s), key=lambda each: each.step_s or 0.0)
    if len(timed) > 1:
        first, last = timed[0], timed[-1]
        ratio = (last.step_s or 0.0) / (first.step_s or 1.0)
        said.append(
            f"{first.run.name} takes {first.step_s:.3g} s a step, {ratio:.2f} times as fast as {last.run.name}"
            if ratio >= 1.03
            else f"all take about {first.step_s:.3g} s a step"
        )
    reached = min((int(each.run.metrics.steps[-1]) for each in compared if len(each.run.metrics.steps)), default=0)
    rewards = [(each, reward_at(each.run, reached)) for each in compared]
    ranked = sorted(((reward, each) for each, reward in rewards if reward is not None), key=lambda pair: -pair[0])
    if len(ranked) > 1:
        reported = ", ".join(f"{each.run.name} {reward:.3f}" for reward, each in ranked)
        said.append(f"reward at step {reached:,}: {reported}")
    return f"{'; '.join(said) or 'Nothing in these runs can be compared yet'}."


def reward_at(run: Run, step: int) -> float | None:
    """Mean reward of the last logs up to a step."""
    column = run.metrics.get("reward")
    if column is None:
        return None
    values = column[(run.metrics.steps <= step) & np.isfinite(column)]
    return float(values[-END_LOGS:].mean()) if len(values) else None


def curves_of(compared: Sequence[Compared]) -> Multiples:
    """Make one chart for each metric of the runs, with one colour per run."""
    found = Multiples("runs")
    bins = [bins_of(len(each.run.metrics.steps)) for each in compared]
    of_runs = [each.last(one.run.metrics.steps) for each, one in zip(bins, compared, strict=True)]
    steps = np.unique(np.concatenate(of_runs)) if of_runs else np.zeros(0, dtype=np.int64)
    columns = found.tables["runs"] = {"step": numbers(steps)}
    functions = sorted({name for each in compared for name in each.run.metrics.reward_functions})
    shown = functions if len(functions) > 1 else []  # a single function is the reward
    of_functions = [(f"Reward function {name}", "reward", f"rewards/{name}/mean") for name in shown]
    for title, unit, name in [CURVES[0], *of_functions, *CURVES[1:]]:
        lines = []
        for number, each in enumerate(compared):
            if each.run.metrics.get(name) is None:
                continue
            values = np.full(len(steps), np.nan)
            values[np.searchsorted(steps, of_runs[number])] = bins[number].means(each.run.metrics.columns[name])
            column = f"{number}:{name}"
            columns[column] = numbers(values)
            lines.append(Mark(label=each.run.name, colour=each.colour, column=column))
        if lines:
            found.add(title, unit, "runs", lines)
    return found


def flat(run: Run) -> dict[str, str]:
    """Arguments, versions and topology of a run, as names and texts."""
    last = run.last
    found = {name: text_of(value) for name, value in last.arguments.items()}
    found |= {f"version of {name}": version for name, version in last.versions.items()}
    found |= {f"topology: {name}": text_of(value) for name, value in last.topology.items() if name != "hosts"}
    return found | {"commit": last.commit[:12], "python": last.python}


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def differing(runs: Sequence[dict[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    names = sorted({name for run in runs for name in run})
    rows = ((name, tuple(run.get(name, "–") for run in runs)) for name in names)
    own = {"output_dir", "run_name", "logging_dir"}
    return tuple((name, values) for name, values in rows if len(set(values)) > 1 and name not in own)
