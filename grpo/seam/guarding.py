"""Comparison of the engines' log-probabilities with the trainer's, batch by batch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from grpo.config.models import samples_as_scored
from grpo.faults.failure import FailureKind, FailureRecord, StepFailed
from grpo.place.wire import Wire
from grpo.record.metrics import models_tokens
from grpo.rollout.facts import sampled_by
from grpo.seam.observing import BatchRecords
from grpo.seam.run import JobRun
from grpo.seam.view import Batch, TrainerView
from grpo.weights.guard import IN_A_ROW, Drift, LogprobGuard, gaps_by_node

_log = logging.getLogger(__name__)
_ORIGIN = "sampled_by"  # in a batch: the node that sampled each row with the present weights, -1 for none


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankGap(Wire):
    """One rank's sums of a batch."""

    node: int
    host: str
    sums: dict[int, tuple[float, int]]
    """See `GapSums`."""


class BatchGuard:
    """Comparison of each node's log-probabilities with the trainer's own, batch by batch; see `LogprobGuard`.

    It needs no forward pass of its own: with TRL's correction, or several optimizer steps per batch, TRL scores the
    batch before training (1.16); otherwise training's own forward passes do, before the weights change. Rows sampled
    with older weights do not count: with `generation_lookahead` none does.
    """

    def __init__(self, view: TrainerView, run: JobRun, records: BatchRecords) -> None:
        self._view, self._run, self._records = view, run, records
        self._guard = LogprobGuard()  # without references: the first weight sync is a full one
        self._full_syncs = 0
        """Number of the engines' full syncs when the guard last took new references."""
        self._gap_sums: torch.Tensor | None = None
        """[N, 2] float64, per node: sum of absolute differences, and number of tokens; None without a batch to
        judge."""

    def take(self, scored: Batch, *, has_own: bool) -> None:
        """Take a generation batch that TRL has scored.

        Args:
            has_own: True if `old_per_token_logps`, where present, are the trainer's own.
        """
        if self._view.mode != "train" or self._view.args.generation_lookahead:
            return
        if (last := self._view.engines.last_batch) is None or scored.get("sampling_per_token_logps") is None:
            return
        origin = sampled_by(last.completions, self._view.state.global_step)
        if len(origin) == len(scored["completion_mask"]):  # a subclass may ask for completions of its own
            scored[_ORIGIN] = torch.from_numpy(origin).to(scored["completion_mask"].device)
            if has_own and (own := scored.get("old_per_token_logps")) is not None:
                self.note(scored, own)

    def note(self, batch: Mapping[str, Any], own: torch.Tensor) -> None:
        """Add the trainer's log-probabilities of these rows, [rows, tokens] float."""
        if _ORIGIN not in batch:
            return
        of_rows = gap_of_rows(batch, own)
        is_counted = batch[_ORIGIN] >= 0
        sums = self._gap_sums
        if sums is None:
            sums = torch.zeros(self._run.groups.topology.num_nodes, 2, dtype=torch.float64, device=own.device)
        self._gap_sums = sums.index_add(0, batch[_ORIGIN][is_counted], of_rows[is_counted])

    def after_step(self) -> None:
        """Judge the batch that the step was trained on. Collective.

        Raises:
            StepFailed: on every rank; a node is above `vllm_max_logprob_gap`.
        """
        if self._gap_sums is not None:
            sums, self._gap_sums = self._gap_sums, None
            self._judge({node: (total, int(count)) for node, (total, count) in enumerate(sums.tolist()) if count})

    def _judge(self, sums: dict[int, tuple[float, int]]) -> None:
        """Compare the nodes' gaps with the user's limit and the guard's. Collective; raises as `after_step` does."""
        groups, watch = self._run.groups, self._run.watch
        assert watch is not None, "engines have sampled"
        mine = _RankGap(node=groups.topology.node, host=watch.host, sums=sums)
        ranks: list[_RankGap] = groups.exchange(watch, None, mine, _RankGap)
        gaps = gaps_by_node(each.sums for each in ranks)
        if not gaps:
            return
        hosts = {each.node: each.host for each in ranks}
        self._note_gaps(gaps)
        self._check_limit(gaps, hosts)
        delivery = self._view.engines.delivery
        if delivery.full_syncs != self._full_syncs:
            self._full_syncs, self._guard = delivery.full_syncs, self._guard.restarted()
        for drift in (drifts := self._guard.judge(gaps)):
            _log.warning("WARNING: %s", _drift_text(drift, hosts[drift.node]))
        if drifts:
            delivery.require_full_sync()
        self._view.note_metrics({"sampling/gap_alarms": float(self._guard.num_alarms)})

    def _note_gaps(self, gaps: Mapping[int, float]) -> None:
        name, values = "sampling/logprob_gap", [*gaps.values()]
        mean = sum(values) / len(values)
        self._view.note_metrics({name: mean, f"{name}_min": min(values), f"{name}_max": max(values)})
        if len(gaps) == self._run.groups.topology.num_nodes:
            self._records.note_nodes({name: values})

    def _check_limit(self, gaps: Mapping[int, float], hosts: Mapping[int, str]) -> None:
        args, node = self._view.args, max(gaps, key=lambda node: gaps[node])
        limit, is_own = args.vllm_max_logprob_gap, self._view.rollout_func is not None
        if limit is None or gaps[node] <= limit or is_own or not samples_as_scored(args):
            return
        cause = (
            f"log-probabilities of engines and trainer differ by {gaps[node]:.3g} nats in the mean over the tokens of "
            f"step {self._view.state.global_step} that this node has sampled [GRPO-414]; vllm_max_logprob_gap is "
            f"{limit:g}"
        )
        raise StepFailed(
            FailureRecord(
                node=node,
                rank=self._run.groups.topology.nodes()[node][0],
                host=hosts[node],
                phase="train",
                cause=cause,
                kind=FailureKind.ENGINE,
            )
        )


def gap_of_rows(batch: Mapping[str, Any], own: torch.Tensor) -> torch.Tensor:
    """Return [rows, 2] float64: the sum of absolute differences of log-probabilities over sampled tokens, and the
    number of these tokens. Tokens without an engine's log-probability are left out.

    Args:
        batch: the batch that TRL trains on.
        own: the trainer's log-probabilities at the same temperature, [rows, tokens].
    """
    difference = (own - batch["sampling_per_token_logps"]).abs().double()
    counted = models_tokens(batch) & ~difference.isnan()
    return torch.stack([difference.where(counted, 0).sum(1), counted.sum(1)], dim=1)


def _drift_text(drift: Drift, host: str) -> str:
    return (
        f"node {drift.node} ({host}): log-probabilities of its engines and of the trainer differ by {drift.gap:.3g} "
        f"nats in the mean over the tokens of the last {IN_A_ROW} batches (each above {drift.limit:.3g}), by "
        f"{drift.reference:.3g} after the last full weight sync: its engines may hold other weights than the trainer; "
        "the next weight sync sends everything and is verified [GRPO-413]"
    )
