"""Cost and policy lag of generation batches: records and metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo.faults.failure import FailureRecord
from grpo.place.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport(Wire):
    """Cost of one generation batch on a node.

    Example:
        GenerationReport(generate_s=12.4, wait_s=3.1, idle_s=0.2, period_s=20.5, num_tokens=81920, num_completions=256)
    """

    generate_s: float
    """Seconds from its submission to its last completion, in the engines."""
    wait_s: float
    """Seconds of these in which the ranks only waited for it."""
    idle_s: float
    """Seconds since the last batch in which an engine had neither requests nor weights to load; mean over the node's
    engines."""
    period_s: float | None
    """Seconds since the last batch was collected; None for the first."""
    num_tokens: int
    """Completion tokens sampled by the node's engines."""
    num_completions: int
    num_reissued: int = 0
    """Number of completions sent again, because their engine had died."""
    num_refused: int = 0
    """Completions whose prompts were refused."""
    num_failed: int = 0
    """Completions left out because the rollout function marked them as failed."""
    refusal: FailureRecord | None = None
    """Reason of the first refusal."""
    num_not_finite: int = 0
    """Tokens since the last report with non-finite log-probabilities."""
    not_finite: FailureRecord | None = None
    """Record about an engine with too many of them."""
    newer: "Newer" = field(default_factory=lambda: Newer())
    """Policy versions gained between submission and sampling."""
    num_sampled: int | None = None
    """Tokens since the last report, of any batch; None: of this batch alone, in `generate_s`."""
    sampling_s: float = 0.0
    """Sampling time of `num_sampled` in seconds, mean over the node's engines."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput while the engines sample."""
        num_tokens, seconds = self.num_tokens, self.generate_s
        if self.num_sampled is not None:
            num_tokens, seconds = self.num_sampled, self.sampling_s
        return num_tokens / seconds if num_tokens and seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Newer(Wire):
    """Policy versions gained between a batch's submission and its sampling; sums."""

    versions: int = 0
    """Policy versions gained at the start of each completion, summed over completions."""
    steps: int = 0
    """Optimizer steps, summed likewise."""
    token_versions: int = 0
    """Policy versions gained at each token, summed over tokens."""
    least: int = 0
    """Policy versions gained at the start of the first completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLag:
    """Age of the policy that sampled a batch, at the batch's first use."""

    versions: float
    """Policy versions between sampling and first use; mean over the job's completions."""
    steps: float
    """Optimizer steps between sampling and first use; mean over the job's completions."""
    token_versions: float = 0.0
    """Policy versions, mean over tokens: with weight syncs during a completion, its later tokens have newer
    versions."""
    most: int = 0
    """Policy versions of the oldest token."""

    @staticmethod
    def of(reports: "Sequence[GenerationReport]", *, versions: int, steps: int) -> "PolicyLag":
        """Compute the lag from the reports of all nodes.

        Args:
            versions: policy versions from the batch's submission to its first use.
            steps: optimizer steps in the same time.
        """
        num_completions = max(1, sum(report.num_completions for report in reports))
        num_tokens = max(1, sum(report.num_tokens for report in reports))
        newer = [report.newer for report in reports]
        return PolicyLag(
            versions=versions - sum(each.versions for each in newer) / num_completions,
            steps=steps - sum(each.steps for each in newer) / num_completions,
            token_versions=versions - sum(each.token_versions for each in newer) / num_tokens,
            most=versions - min((each.least for each in newer), default=0),
        )


def figures_of_nodes(reports: Sequence[GenerationReport]) -> dict[str, list[float]]:
    """Cost of a generation batch on each node, by metric."""
    return {
        "rollout/generate_s": [report.generate_s for report in reports],
        "rollout/tokens_per_s": [report.tokens_per_s for report in reports],
        "rollout/wait_s": [report.wait_s for report in reports],
        "engine/idle_s": [report.idle_s for report in reports],
    }


def generation_metrics(reports: Sequence[GenerationReport], lag: PolicyLag) -> dict[str, float]:
    """Metrics of one generation batch: mean, minimum and maximum over the nodes; shares are of the time since the last
    batch."""
    of_nodes = figures_of_nodes(reports)
    periods = [(report, report.period_s) for report in reports if report.period_s is not None]
    if periods:
        of_nodes["rollout/wait_share"] = [report.wait_s / period_s for report, period_s in periods]
        of_nodes["engine/idle_share"] = [report.idle_s / period_s for report, period_s in periods]
    metrics = {"engine/requests_reissued": float(sum(report.num_reissued for report in reports))}
    metrics["engine/nonfinite_logprobs"] = float(sum(report.num_not_finite for report in reports))
    metrics["rollout/refused"] = float(sum(report.num_refused for report in reports))
    metrics |= {"rollout/policy_lag": lag.versions, "rollout/policy_lag_steps": lag.steps}
    metrics |= {"rollout/staleness_mean": lag.token_versions, "rollout/staleness_max": float(lag.most)}
    for name, values in of_nodes.items():
        metrics[name] = sum(values) / len(values)
        metrics[f"{name}_min"] = min(values)
        metrics[f"{name}_max"] = max(values)
    return metrics


class Period:
    """Timer between the ends of batches."""

    def __init__(self) -> None:
        self._last: float | None = None

    def take_s(self) -> float | None:
        now = time.monotonic()
        before, self._last = self._last, now
        return None if before is None else now - before
