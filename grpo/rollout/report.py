"""What generation batches cost, and how old the policy was that sampled them: records, and their metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo.faults.failure import FailureRecord
from grpo.place.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport(Wire):
    """What one generation batch cost a node."""

    generate_s: float
    """From its submission to its last completion, in the engines."""
    wait_s: float
    """Of these, the seconds in which the ranks did nothing but wait for it."""
    idle_s: float
    """Since the batch before, the seconds in which an engine had neither anything to sample nor weights to load; mean
    over the node's engines."""
    period_s: float | None
    """Since the batch before was collected, whatever was done; None for the first."""
    num_tokens: int
    """Completion tokens that the node's engines sampled."""
    num_completions: int
    num_reissued: int = 0
    """Of these, how often one was given to an engine again, because the one before it had died."""
    num_refused: int = 0
    """Completions whose prompts no engine took."""
    num_failed: int = 0
    """Completions left out because the rollout function has marked them as failed."""
    refusal: FailureRecord | None = None
    """Why, for the first that was refused."""
    num_not_finite: int = 0
    """Tokens since the report before to which an engine gave a log-probability that is no finite number."""
    not_finite: FailureRecord | None = None
    """Which engine, where they are too many."""
    newer: "Newer" = field(default_factory=lambda: Newer())
    """By how much newer the policies are that have sampled it."""
    num_sampled: int | None = None
    """Tokens since the report before, of whichever batch; None: of this batch alone, in `generate_s`."""
    sampling_s: float = 0.0
    """In which engines have sampled these, in the mean over the node's."""

    @property
    def tokens_per_s(self) -> float:
        """While the engines sample."""
        num_tokens, seconds = self.num_tokens, self.generate_s
        if self.num_sampled is not None:
            num_tokens, seconds = self.num_sampled, self.sampling_s
        return num_tokens / seconds if num_tokens and seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Newer(Wire):
    """How much newer the policies are that have sampled a batch than the one to which it was submitted; added up."""

    versions: int = 0
    """Over completions, when each began: policy versions."""
    steps: int = 0
    """Likewise, in optimizer steps."""
    token_versions: int = 0
    """Over tokens: policy versions."""
    least: int = 0
    """Of the completion that began first: policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLag:
    """How old the policy is that sampled a batch, when the batch is first used."""

    versions: float
    """Policy versions between sampling and first use; mean over the job's completions, as for the other."""
    steps: float
    """Optimizer steps, likewise."""
    token_versions: float = 0.0
    """Policy versions, in the mean over tokens: where weights come in the middle of a completion, its later tokens are
    of newer ones."""
    most: int = 0
    """Policy versions, of the token that is the oldest."""

    @staticmethod
    def of(reports: "Sequence[GenerationReport]", *, versions: int, steps: int) -> "PolicyLag":
        """By the reports of all nodes.

        Args:
            versions: policy versions from the batch's submission to its first use.
            steps: optimizer steps, likewise.
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
    """What a generation batch cost each node."""
    return {
        "rollout/generate_s": [report.generate_s for report in reports],
        "rollout/tokens_per_s": [report.tokens_per_s for report in reports],
        "rollout/wait_s": [report.wait_s for report in reports],
        "engine/idle_s": [report.idle_s for report in reports],
    }


def generation_metrics(reports: Sequence[GenerationReport], lag: PolicyLag) -> dict[str, float]:
    """Of one generation batch: mean, least and largest over the nodes; shares are of the time since the last batch."""
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
    """The time from one batch's end to the next one's."""

    def __init__(self) -> None:
        self._last: float | None = None

    def take_s(self) -> float | None:
        now = time.monotonic()
        before, self._last = self._last, now
        return None if before is None else now - before
