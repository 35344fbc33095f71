"""What generation batches cost, and how old the policy was that sampled them: records, and their metrics."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport:
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

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generate_s if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLag:
    """How old the policy is that sampled a batch, when the batch is first used."""

    pushes: int
    """Between sampling and first use."""
    steps: int
    """Optimizer steps, likewise."""


def generation_metrics(reports: Sequence[GenerationReport], lag: PolicyLag) -> dict[str, float]:
    """Of one generation batch: mean, least and largest over the nodes; shares are of the time since the last batch."""
    of_nodes = {
        "rollout/generate_s": [report.generate_s for report in reports],
        "rollout/tokens_per_s": [report.tokens_per_s for report in reports],
        "rollout/wait_s": [report.wait_s for report in reports],
        "engine/idle_s": [report.idle_s for report in reports],
    }
    periods = [(report, report.period_s) for report in reports if report.period_s is not None]
    if periods:
        of_nodes["rollout/wait_share"] = [report.wait_s / period_s for report, period_s in periods]
        of_nodes["engine/idle_share"] = [report.idle_s / period_s for report, period_s in periods]
    metrics = {"rollout/policy_lag": float(lag.pushes), "rollout/policy_lag_steps": float(lag.steps)}
    for name, values in of_nodes.items():
        metrics[name] = sum(values) / len(values)
        metrics[f"{name}_min"] = min(values)
        metrics[f"{name}_max"] = max(values)
    return metrics
