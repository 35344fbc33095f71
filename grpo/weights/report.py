"""Cost of weight syncs and results of their verification: records and metrics. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.place.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap(Wire):
    """Absolute differences of log-probabilities over the probe, in nats.

    Example:
        LogprobGap(mean=0.0041, max=0.062, judged=0.0041)
    """

    mean: float
    max: float
    judged: float
    """Figure compared with the limit: the mean; for a model with routers see `gap_between`."""
    behind_image: bool = False
    """True if the tokens follow an image, and so depend on the towers."""

    def __str__(self) -> str:
        judged = "" if self.judged == self.mean else f", which counts as {self.judged:.3g} in a model with routers"
        return f"{self.mean:.3g} nats in the mean and {self.max:.3g} at most{judged}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of verifying one weight sync, over the whole job."""

    number: int
    """Number of the weight sync, counted from 1."""
    policy_version: int
    gap: LogprobGap
    """Gap of the worst engine."""
    limit: float
    """Limit on the gap."""

    @property
    def is_within(self) -> bool:
        """True if the gap is within the limit; beyond it the job continues, with a warning."""
        return self.gap.judged <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncReport(Wire):
    """Cost of one weight sync on this rank. Gathering and sending overlap: their sum is more than the total.

    Example:
        WeightSyncReport(total_s=1.42, gather_s=0.61, send_s=1.20, num_bytes=1_191_586_816)
    """

    total_s: float
    """Seconds from the call until the engines are ready; on non-sending ranks, to the end of the last gather."""
    gather_s: float
    """Main thread's time for gathering buckets: casts, gathers, and copies into packed buffers; over NCCL, for queueing
    them on the GPU."""
    send_s: float
    """Seconds from the first bucket sent until the engines have loaded all: transport, loading, and gathers meanwhile.
    0 on non-sending ranks."""
    num_bytes: int
    """Bytes sent to each engine; 0 on non-sending ranks."""
    paused_s: float | None = None
    """Seconds from the call to pause the node's engines to the end of the call to resume them; None without a pause,
    and on non-sending ranks."""
    gap: LogprobGap | None = None
    """Gap of the node's worst engine; None without a verification, or on a rank without engines."""

    def __str__(self) -> str:
        took = f"gather {self.gather_s:.2f} s, send {self.send_s:.2f} s"
        return f"{self.num_bytes} bytes in {self.total_s:.2f} s ({took})"

    def metrics(self) -> dict[str, float]:
        metrics = {
            "weight_sync/total_s": self.total_s,
            "weight_sync/gather_s": self.gather_s,
            "weight_sync/send_s": self.send_s,
            "weight_sync/bytes": float(self.num_bytes),
        }
        if self.paused_s is not None:
            metrics["weight_sync/paused_s"] = self.paused_s
        if self.gap is not None:
            metrics |= {"weight_sync/logprob_gap_mean": self.gap.mean, "weight_sync/logprob_gap_max": self.gap.max}
            metrics |= {"weight_sync/logprob_gap_judged": self.gap.judged}
        return metrics


def slowest(reports: Sequence[WeightSyncReport]) -> WeightSyncReport:
    """Cost of one weight sync for the job: the maximum of each figure over all ranks."""
    gaps = [report.gap for report in reports if report.gap is not None]
    paused_s = [report.paused_s for report in reports if report.paused_s is not None]
    return WeightSyncReport(
        total_s=max(report.total_s for report in reports),
        gather_s=max(report.gather_s for report in reports),
        send_s=max(report.send_s for report in reports),
        num_bytes=max(report.num_bytes for report in reports),
        paused_s=max(paused_s) if paused_s else None,
        gap=_worst(gaps) if gaps else None,
    )


def _worst(gaps: Sequence[LogprobGap]) -> LogprobGap:
    return LogprobGap(
        mean=max(gap.mean for gap in gaps),
        max=max(gap.max for gap in gaps),
        judged=max(gap.judged for gap in gaps),
        behind_image=max(gaps, key=lambda gap: gap.judged).behind_image,
    )
