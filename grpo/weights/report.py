"""What weight syncs cost and what their verifications found: records, and their metrics. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.place.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap(Wire):
    """Absolute differences of log-probabilities over the probe, in nats."""

    mean: float
    max: float
    judged: float
    """What is held to the limit: the mean; of a model with routers what `gap_between` makes of it."""
    behind_image: bool = False
    """Whether the tokens follow an image, which towers have part in then."""

    def __str__(self) -> str:
        judged = "" if self.judged == self.mean else f", which counts as {self.judged:.3g} in a model with routers"
        return f"{self.mean:.3g} nats in the mean and {self.max:.3g} at most{judged}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the verification of one weight sync found, over the whole job."""

    number: int
    """Of the weight sync, counted from 1."""
    policy_version: int
    gap: LogprobGap
    """The worst engine's."""
    limit: float
    """That the gap was held to."""

    @property
    def is_within(self) -> bool:
        """Whether the gap is within the limit; beyond it the job goes on, with a warning."""
        return self.gap.judged <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncReport(Wire):
    """What one weight sync cost this rank. Gathering and sending overlap: their sum is more than the total."""

    total_s: float
    """From the call to the engines' readiness; on ranks that send nothing, to the end of the last gather."""
    gather_s: float
    """The main thread's time in bringing buckets together: casts, gathers, and the copies into packed buffers; over
    NCCL, in queueing that on the GPU."""
    send_s: float
    """From the first bucket on its way until the engines have taken up all: transport, loading, and what was gathered
    meanwhile. 0 on ranks that send nothing."""
    num_bytes: int
    """Bytes that each engine was sent; 0 on ranks that send nothing."""
    paused_s: float | None = None
    """From the call that paused the node's engines to the end of the one that let them go on; None where they were not
    paused, or the rank sends nothing."""
    gap: LogprobGap | None = None
    """The worst engine's of the node; None where none was asked: the weight sync was not verified, or the rank has
    none."""

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
    """What one weight sync cost the job: of each figure the largest of any rank."""
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
