"""Advice: small functions of the figures; each names one option, or returns None."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from grpo.ops import MOST_AHEAD
from grpo.ops.report import shares
from grpo.ops.report.reading import Run
from grpo.ops.report.shares import Parts, Slowest
from grpo.record.timeline import records

MULTI_TURN = ("tools", "environment_factory", "rollout_func")  # beside the options in run.json
LONG = 3.0  # times the mean length; a longest completion below it is no tail for more batches in flight to hide
MIN_LOGS = 5  # with fewer logs, the slow first steps would decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One advised change, with its reason."""

    setting: str
    """Option and value, as written in a configuration."""
    finding: str
    """Observation with its numbers: the beginning of a sentence."""
    other: str = ""
    """Action, if it is not to set the option to the value."""
    why: str
    """Effect and cost of the change."""
    weight: float
    """Approximate share of the time, or of the completions, that it affects; the largest comes first."""

    @property
    def do(self) -> str:
        """End of the sentence."""
        return self.other or "set {} to {}".format(*self.setting.split(": "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a run, the input of all advice."""

    run: Run
    parts: Parts
    slowest: Slowest | None
    wait_share: float
    idle_share: float

    def option(self, name: str, default: Any) -> Any:
        """Return a setting of the newest attempt with recorded settings; the default if unknown, or of another type."""
        value = self.run.settings.arguments.get(name)
        return value if isinstance(value, type(default)) else default

    @property
    def engine_devices(self) -> int:
        value = self.run.settings.topology.get("tensor_parallel_size")
        return value if isinstance(value, int) else 1

    def share(self, *phases: str) -> float:
        return sum(self.parts.shares.get(phase, 0.0) for phase in phases)

    @property
    def node_is_slow(self) -> bool:
        """True if one node delays the others: most of the time, and by much."""
        return self.slowest is not None and self.slowest.share >= 0.5 and self.slowest.ratio >= 1.25

    @property
    def is_multi_turn(self) -> bool:
        """True with tools, environments, agents or a rollout function: no sampling on other nodes."""
        return any(self.option(name, False) for name in MULTI_TURN)

    @property
    def can_look_ahead(self) -> bool:
        """True if `generation_lookahead` is possible at the next start and would help: not if ranks and engines share
        the same cores."""
        has_rows, clips = not self.option("streams", False), self.option("old_logprobs", "trainer") == "engine"
        corrects = clips or self.option("vllm_importance_sampling_correction", True)
        return has_rows and corrects and self.run.settings.topology.get("has_gpus", True)

    @property
    def takes_turns(self) -> bool:
        """True if ranks and engines wait for each other in turn, and need not."""
        can = self.can_look_ahead and not self.option("generation_lookahead", 0)
        return can and min(self.wait_share, self.idle_share) >= 0.15

    @property
    def tail(self) -> float:
        """Ratio of the longest completion to the mean one, in a batch; 0 if unknown."""
        mean, longest = (shares.mean(self.run, f"completions/{name}_length") or 0.0 for name in ("mean", "max"))
        return longest / mean if mean else 0.0

    @property
    def depth(self) -> int | None:
        """Advised number of batches in flight, so that ranks do not wait for the longest completion of one: its length
        in steps, plus one. None if this is not the cause of waiting, or if as many are in flight already."""
        generate_s, wait_s = (shares.mean(self.run, f"rollout/{name}") or 0.0 for name in ("generate_s_max", "wait_s"))
        if not self.can_look_ahead or self.wait_share < 0.15 or self.tail < LONG or not generate_s:
            return None
        step_s = max(wait_s / self.wait_share - wait_s, generate_s / self.tail)  # of ranks and engines independently
        depth = min(MOST_AHEAD, math.ceil(generate_s / step_s) + 1)
        return depth if depth > self.option("generation_lookahead", 0) else None

    @property
    def steps_between_saves(self) -> int | None:
        """`save_steps`, resolved if it is a share of all steps; None if saves are not by steps."""
        every = self.run.settings.arguments.get("save_steps", 500)
        if self.option("save_strategy", "steps") != "steps" or not isinstance(every, int | float) or every <= 0:
            return None
        return round(every) if every >= 1 else max(1, round(every * (shares.total_steps(self.run) or 500 / every)))


def figures_of(run: Run, parts: Parts) -> Figures:
    return Figures(
        run=run,
        parts=parts,
        slowest=shares.slowest_of(run),
        wait_share=shares.mean(run, "rollout/wait_share") or parts.shares.get(records.WAIT_GENERATE, 0.0),
        idle_share=shares.mean(run, "engine/idle_share") or 0.0,
    )


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def slow_node(figures: Figures) -> Advice | None:
    slowest = figures.slowest
    by_default = figures.option("generation_lookahead", 0) >= 2
    moves = figures.option("vllm_balance_nodes", by_default) or figures.is_multi_turn
    if slowest is None or not figures.node_is_slow or moves:
        return None
    return Advice(
        setting="vllm_balance_nodes: true",
        finding=f"node {slowest.node} was slowest in {percent(slowest.share)} of the steps "
        f"({slowest.ratio:.1f} times the others' time)",
        why="Prompts then move from slow nodes to fast ones. `grpo doctor` on that node may say why it is slow.",
        weight=figures.wait_share,
    )


def sampling_ahead(figures: Figures) -> Advice | None:
    wait, idle, depth = figures.wait_share, figures.idle_share, figures.depth
    finding = f"ranks wait {percent(wait)} for completions, the longest of which have {figures.tail:.0f} times the mean"
    why = "These then have as many steps' time. Completions are older; how many engines are best, too: `grpo plan`."
    if depth is None:
        if not figures.takes_turns:
            return None
        finding, depth, wait = f"engines idle {percent(idle)} and ranks wait {percent(wait)}", 1, min(wait, idle)
        why = f"Overlap saves up to {percent(wait)} of a step. Completions are then one weight sync older."
    if figures.is_multi_turn:
        why += " Mark what runs in the main thread with grpo.in_threads: tools, environments, a rollout function."
    return Advice(setting=f"generation_lookahead: {depth}", finding=finding, why=why, weight=wait)


def more_engines(figures: Figures) -> Advice | None:
    left = figures.wait_share - (figures.idle_share if figures.takes_turns else 0.0)
    if figures.node_is_slow or left < 0.35 or figures.depth is not None:  # more engines shorten no single completion
        return None
    also = " even with asynchronous generation" if figures.takes_turns else ""
    finding = f"ranks wait {percent(left)} for engines{also}"
    why = "Generation takes longer than training: engines with more devices shorten it, and fewer ranks train."
    fewest = min(figures.run.by_node("engines"), default=1)
    if not figures.run.settings.topology.get("has_gpus", True):
        option, value = "vllm_engines_per_node", fewest + 1
    else:
        each = figures.engine_devices
        option, value = "vllm_reserved_gpus", (fewest + 1) * each
        if min(figures.run.by_node("ranks"), default=2) <= each:
            return None  # nothing would be left to train on
    return Advice(
        setting=f"{option}: {value}",
        finding=finding,
        why=why,
        # asynchronous generation costs no GPU: that first
        weight=0.9 * figures.idle_share if figures.takes_turns else left,
    )


def fewer_engines(figures: Figures) -> Advice | None:
    engines, each = max(figures.run.by_node("engines"), default=1), figures.engine_devices
    ahead = figures.option("generation_lookahead", 0) > 0
    if not ahead or figures.idle_share < 0.35 or engines < 2 or not figures.run.settings.topology.get("has_gpus"):
        return None
    return Advice(
        setting=f"vllm_reserved_gpus: {(engines - 1) * each}",
        finding=f"engines idle {percent(figures.idle_share)} with asynchronous generation",
        why="Training takes longer than generation: a device that engines give back becomes a rank.",
        weight=figures.idle_share,
    )


def slow_rewards(figures: Figures) -> Advice | None:
    share = figures.share(records.SCORE)
    if share < 0.2:
        return None
    spans = figures.run.timeline.spans
    keep = spans.in_phases(records.SCORE)
    seconds = np.bincount(spans.name[keep], (spans.end - spans.begin)[keep], len(spans.names))
    name = spans.names[int(np.argmax(seconds))] or "the reward function"
    return Advice(
        setting=f"reward_funcs: {name} as async def",
        finding=f"rewards take {percent(share)} of the time, most of it {name}",
        other=f"make {name} in reward_funcs faster, an `async def`, or mark it with `scores_each`",
        why="Ranks wait for it in every step. `async def` functions run side by side, marked ones beside sampling.",
        weight=share,
    )


def slow_sync(figures: Figures) -> Advice | None:
    share = figures.share(records.SYNC, records.VERIFICATION)
    if share < 0.15:
        return None
    finding = f"weight syncs take {percent(share)} of the time"
    if figures.option("vllm_sync_backend", "auto") == "shm" and figures.run.settings.topology.get("has_gpus"):
        return Advice(
            setting="vllm_sync_backend: nccl",
            finding=finding,
            why="Shared memory takes the way over the host; NCCL goes from GPU to GPU.",
            weight=share,
        )
    now = max(figures.option("steps_per_generation", 0), figures.option("gradient_accumulation_steps", 1))
    return Advice(
        setting=f"steps_per_generation: {2 * now}",
        finding=finding,
        why="More is then trained for each weight sync, and completions are older. Where `weight_sync/gather_s` is "
        "most of it, the network between nodes is slow: `grpo doctor` measures it.",
        weight=share,
    )


def slow_saves(figures: Figures) -> Advice | None:
    share, every = figures.share(records.SAVE), figures.steps_between_saves
    if share < 0.1 or every is None:
        return None
    rarer, spans = every * max(2, round(share / 0.03)), figures.run.timeline.spans
    longest_s = float((spans.end - spans.begin)[spans.in_phases(records.SAVE)].max(initial=0.0))
    return Advice(
        setting=f"save_steps: {rarer}",
        finding=f"saving takes {percent(share)} of the time",
        why=f"A save holds training {shares.mean(figures.run, 'run/save_s') or longest_s:.0f} s, every "
        f"{every} steps. A failure then loses more steps. A faster disk under output_dir helps as well.",
        weight=share,
    )


def no_spread(figures: Figures) -> Advice | None:
    share = shares.mean(figures.run, "frac_reward_zero_std", shares.RECENT_LOGS) or 0.0
    if share < 0.6:
        return None
    more = 2 * figures.option("num_generations", 8)
    return Advice(
        setting=f"num_generations: {more}",
        finding=f"{percent(share)} of the groups had the same reward for all their completions",
        other=f"set num_generations to {more}, or leave out prompts that are always or never solved",
        why="Such a group has no advantage, and nothing is learnt from it. Larger groups differ more often.",
        weight=share,
    )


def cut_off(figures: Figures) -> Advice | None:
    share = shares.mean(figures.run, "completions/clipped_ratio", shares.RECENT_LOGS) or 0.0
    if share < 0.3:
        return None
    longer = 2 * figures.option("max_completion_length", 256)
    return Advice(
        setting=f"max_completion_length: {longer}",
        finding=f"{percent(share)} of the completions ended at their longest length",
        why="What is cut off is mostly rewarded as wrong. Longer completions take more time and memory: `grpo plan`.",
        weight=share,
    )


def refused(figures: Figures) -> Advice | None:
    most = shares.maximum(figures.run, "rollout/refused")
    if not most:
        return None
    return Advice(
        setting="vllm_max_model_length: longer than the longest prompt and its completion",
        finding=f"up to {most:g} completions of a batch were left out, because no engine takes their prompts",
        other="raise vllm_max_model_length, or leave out prompts that are too long",
        why="They count for no reward and no gradient; more than vllm_max_refused of them end the job.",
        weight=0.1,
    )


def deaths(figures: Figures) -> Advice | None:
    died = count_deaths(figures.run)
    if died < 2 or figures.option("vllm_standby", False):
        return None
    return Advice(
        setting="vllm_standby: true",
        finding=f"engines died {died} times and came back",
        other="read why in their logs (Failures), and set vllm_standby to true",
        why="A process that has imported vLLM then waits on each node, so that an engine is back sooner, for 1 GB.",
        weight=0.2,
    )


def count_deaths(run: Run) -> int:
    """Count restarted engines, over all attempts."""
    died = run.metrics.get("engine/restarts")
    if died is None:
        return int(run.timeline.spans.in_phases(records.RESTART).sum())
    attempts = run.metrics.columns.get("attempt", np.zeros(len(died)))
    most = [np.nanmax(died[attempts == each], initial=0) for each in np.unique(attempts[np.isfinite(attempts)])]
    return round(float(np.sum(most)))


def gap(figures: Figures) -> Advice | None:
    names = ("weight_sync/logprob_gap_judged", "weight_sync/logprob_gap_mean")  # an older run has only the second
    apart = next((found for name in names if (found := shares.mean(figures.run, name, shares.RECENT_LOGS))), None)
    limit = shares.mean(figures.run, "weight_sync/logprob_gap_limit", shares.RECENT_LOGS)
    if not apart or not limit or apart < 0.6 * limit:
        return None
    return Advice(
        setting="vllm_engine_kwargs, model_init_kwargs: the same attention and dtype on both sides",
        finding=f"log-probabilities of engine and trainer are {apart:.2g} nats apart, {percent(apart / limit)} of the "
        "limit",
        other="let both compute alike (vllm_engine_kwargs, model_init_kwargs)",
        why="Beyond the limit every verified weight sync is done twice, and beyond vllm_max_logprob_gap the job ends. "
        "Importance sampling corrects less well the further they are apart.",
        weight=0.3,
    )


def drifted(figures: Figures) -> Advice | None:
    alarms = shares.maximum(figures.run, "sampling/gap_alarms")
    gaps = shares.of_present_nodes(figures.run, "sampling/logprob_gap")
    if not alarms or gaps is None:
        return None
    usual = np.nanquantile(gaps, 0.25, axis=0)
    node = int(np.nanargmax(np.nanmax(gaps, axis=0) / np.maximum(usual, 1e-9)))
    worst = float(np.nanmax(gaps[:, node]))
    limit = f"{worst / 2:.2g}"
    return Advice(
        setting=f"vllm_max_logprob_gap: {limit}",
        finding=f"the engines of node {node} drifted away from the trainer ({alarms:g} warning{'s' * (alarms > 1)}, "
        f"log-probabilities up to {worst:.2g} nats apart)",
        other=f"see whether the full weight sync after it mended that; vllm_max_logprob_gap {limit} would end the job",
        why="They may have sampled with other weights than the trainer's. A gap that stays after a full weight sync is "
        "no lost weight: engine and trainer compute differently then.",
        weight=0.4,
    )


def lost_steps(figures: Figures) -> Advice | None:
    trained = [each for each in figures.run.attempts if each.step]  # others have not come so far
    goes_on = [(each, after) for each, after in pairwise(trained) if each.state != "finished"]
    lost = sum(max(0, each.step - after.from_step) for each, after in goes_on)
    done, every = max(1, figures.run.step), figures.steps_between_saves
    if lost < max(10, 0.05 * done) or every is None or every < 2:
        return None
    return Advice(
        setting=f"save_steps: {max(1, every // 4)}",
        finding=f"{lost} steps were lost between attempts",
        other=f"set save_steps to {max(1, every // 4)}",
        why="An attempt goes on from the newest complete checkpoint, and does the steps after it again.",
        weight=lost / (lost + done),
    )


ADVICE: tuple[Callable[[Figures], Advice | None], ...] = (
    slow_node,
    sampling_ahead,
    more_engines,
    fewer_engines,
    slow_rewards,
    slow_sync,
    slow_saves,
    no_spread,
    cut_off,
    refused,
    deaths,
    gap,
    drifted,
    lost_steps,
)


def is_judged(figures: Figures) -> bool:
    """True if there are enough logs for advice."""
    return max(len(figures.run.metrics.steps), len(figures.parts.steps)) >= MIN_LOGS


def advice_for(figures: Figures) -> list[Advice]:
    """Return advice in order of weight; none for a run that has hardly begun."""
    if not is_judged(figures):
        return []
    found = [advice for each in ADVICE if (advice := each(figures)) is not None]
    return sorted(found, key=lambda advice: -advice.weight)
