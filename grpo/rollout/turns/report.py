"""Cost of multi-turn rollouts: records of ranks, and their metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo.faults.failure import FailureRecord
from grpo.place.wire import Wire
from grpo.rollout.report import GenerationReport, Newer

SERIAL_SHARE = 0.2  # of a batch's time, in serial tools


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesReport(Wire):
    """Cost of a batch of episodes on a rank."""

    node: int
    first_ask: float
    """Time by time.monotonic() on its node, like `last_answer`."""
    last_answer: float
    wait_s: float
    """Seconds in which this rank ran episodes, and did nothing else."""
    num_episodes: int
    num_refused: int
    """Episodes whose prompts were refused."""
    refusal: FailureRecord | None
    """Reason of the first refusal."""
    counts: Mapping[str, int]
    """Turns and tokens of `Sampler.counts`, and calls of `ToolRunner.counts`."""
    num_failed: int = 0
    """Episodes marked as failed by a rollout function."""
    newer_tokens: int = 0
    """Sum as in `Newer.token_versions`."""
    num_sampled: int | None = None
    """Counted as in `GenerationReport`, on the local main; so is the next field."""
    sampling_s: float = 0.0
    tools_s: float = 0.0
    """Part of `wait_s` in which the main thread ran tools."""
    idle_s: float = 0.0
    """Measured as in `GenerationReport`, on the local main; so are the other fields."""
    period_s: float | None = None
    num_reissued: int = 0
    num_not_finite: int = 0
    not_finite: FailureRecord | None = None


def of_nodes(reports: Sequence[EpisodesReport]) -> list[GenerationReport]:
    """Cost of the batch on each node, in order."""
    merged = []
    for node in sorted({report.node for report in reports}):
        mine = [report for report in reports if report.node == node]
        refusals = [report.refusal for report in mine if report.refusal is not None]
        merged.append(
            GenerationReport(
                generate_s=max(report.last_answer for report in mine) - min(report.first_ask for report in mine),
                wait_s=max(report.wait_s for report in mine),
                idle_s=sum(report.idle_s for report in mine),
                period_s=next((report.period_s for report in mine if report.period_s is not None), None),
                num_tokens=sum(report.counts.get("tokens", 0) for report in mine),
                num_sampled=next((report.num_sampled for report in mine if report.num_sampled is not None), None),
                sampling_s=max(report.sampling_s for report in mine),
                newer=Newer(token_versions=sum(report.newer_tokens for report in mine)),
                num_completions=sum(report.num_episodes for report in mine),
                num_reissued=sum(report.num_reissued for report in mine),
                num_refused=sum(report.num_refused for report in mine),
                num_failed=sum(report.num_failed for report in mine),
                refusal=refusals[0] if refusals else None,
                num_not_finite=sum(report.num_not_finite for report in mine),
                not_finite=next((report.not_finite for report in mine if report.not_finite is not None), None),
            )
        )
    return merged


def serial_tools(reports: Sequence[EpisodesReport]) -> str | None:
    """Advice, if the main thread of a rank ran tools for too large a part of the batch; else None."""
    worst = max(reports, key=lambda report: report.tools_s / max(report.wait_s, report.tools_s, 1e-9))
    if worst.tools_s <= SERIAL_SHARE * worst.wait_s:
        return None
    return (
        f"WARNING: synchronous tools took {worst.tools_s:.2g} s of the {worst.wait_s:.2g} s of a batch of "
        "episodes, as they run one at a time in the main thread [GRPO-613]: write them as async def, or, where "
        "they can run in several threads, set max_tool_threads to a number or mark them with grpo.in_threads"
    )


def episode_metrics(reports: Sequence[EpisodesReport]) -> dict[str, float]:
    """Metrics of one batch, over the job."""

    def total(name: str) -> int:
        return sum(report.counts.get(name, 0) for report in reports)

    metrics = {"rollout/turns": total("turns") / max(1, sum(report.num_episodes for report in reports))}
    if prompt_tokens := total("prompt_tokens"):
        metrics["rollout/cached_share"] = total("cached_tokens") / prompt_tokens
    if total("agent_episodes"):
        metrics["agents/failed"] = float(sum(report.num_failed for report in reports))
        metrics["agents/requests"] = total("agent_requests") / total("agent_episodes")
        metrics["agents/dropped_tokens"] = float(total("agent_dropped_tokens"))
    if total("tool_calls"):
        metrics["tools/abandoned"] = float(total("tool_abandoned"))
    return metrics
