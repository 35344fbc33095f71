"""Delivery of the trainer's weights to all engines of the job, even if some of them die meanwhile."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

from grpo.engine.client import EngineError
from grpo.engine.supervisor import EngineRestart, EngineSupervisor
from grpo.faults.failure import FailureKind, FailureRecord, JobFailed, StepFailed
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.log import FILE_ONLY
from grpo.place.wire import Wire
from grpo.weights.limits import GapVerdict
from grpo.weights.names import some
from grpo.weights.report import LogprobGap, Verification, WeightSyncReport, slowest
from grpo.weights.sync import WeightSyncer
from grpo.weights.verifier import Verifier, is_due
from grpo.weights.wire_format import WireFormat, agreed, ask_engines

if TYPE_CHECKING:
    from grpo.weights.adapter_trial import AdapterTrial  # needs PEFT

_log = logging.getLogger(__name__)

DEATH_FOLLOWS_S = 3.0  # between the first errors from an engine's death and its detection

WARNED_AGAIN_FACTOR = 2.0  # factor over the last warning's gap before another warning


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrivals(Wire):
    """Status of a rank before a weight sync."""

    restarts: tuple[EngineRestart, ...] = ()
    gone: FailureRecord | None = None
    written: tuple[str, ...] = ()
    """Frozen parameters modified since they were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome(Wire):
    """Result of a rank at the end of a phase."""

    is_lost: bool = False
    """True if an engine of its node was lost."""
    report: WeightSyncReport | None = None
    doubt: FailureRecord | None = None
    """Problem with its engines' gap, if beyond the limit; nothing has failed yet."""


@dataclass(eq=False)
class WeightDelivery:
    """Runs and verifies weight syncs, and repeats them after an engine's death. Every rank has one; its methods are
    collective.

    If a gap is beyond the limit, the whole model is sent again: this repairs a lost tensor. If it does not help, the
    job ends after a checkpoint of the last step, or continues with a warning; see `grpo.weights.limits`.

    All branches depend only on values exchanged between ranks, so that all enter the same collectives. While one node
    waits for its engine, the others wait on gloo, never in NCCL.
    """

    engines: EngineSupervisor
    syncer: WeightSyncer
    verifier: Verifier
    groups: NodeGroups
    watch: FailureWatch
    _: KW_ONLY
    wire_format: WireFormat
    """Format agreed with the engines; restarted ones must give the same answer."""
    timeout_s: float
    """Deadline of a call to an engine, and of opening a weight sync group."""
    on_restart: Callable[[EngineRestart], None]
    """Called for every restarted engine of the job."""
    trial: "AdapterTrial | None"
    """Trial of adapters, if they are sent alone; else None."""

    def __post_init__(self) -> None:
        self.restarts: list[EngineRestart] = []
        """Restarted engines of the whole job."""
        self.total_s_by_node: list[float] = []
        """Duration of the last weight sync, of the slowest rank on each node."""
        self.num_repeats = 0
        """Number of weight syncs broken by an engine's death."""
        self.verification: Verification | None = None
        """Last verification; the same on all ranks."""
        self._num_syncs = 0
        self._is_open = self._must_ask = self._must_verify = False
        self._must_try = self.trial is not None
        self._warned_of = 0.0  # nats

    def deliver(self, step: int) -> WeightSyncReport:
        """Update all engines of the job to the current weights; waits for restarting engines.

        Args:
            step: of the weights; the engines' policy version afterwards.

        Returns:
            The cost of the weight sync for the job.

        Raises:
            JobFailed: an engine refused the weights, or the first verification failed.
            StepFailed: an engine will not come back, or a later verification failed.
            GenerationDropped: instead, if a stop was requested.
        """
        sent_again: LogprobGap | None = None  # the gap that caused it
        while True:
            self._bring_back()
            outcomes = self._try_adapter(step) if self._must_try else []
            if outcomes is not None:
                self._must_try = False
                self._num_syncs += 1
                _log.debug("weight sync %d begins: policy version %d", self._num_syncs, step)
                is_verified = is_due(self._num_syncs) or self._must_verify
                outcomes = self._end_phase(*self._sync(step, is_verified, was_sent_again=sent_again is not None))
            if outcomes is not None:
                if (doubted := self._look_at_gap(outcomes, sent_again)) is None:
                    return self._end_sync(step, outcomes)
                sent_again = doubted
                self.require_full_sync()
                continue
            self.num_repeats += 1
            _log.info("weight sync %d is broken by an engine's death: it is repeated", self._num_syncs, extra=FILE_ONLY)
            if self.engines.has_lost():
                self.engines.renew()

    @property
    def full_syncs(self) -> int:
        """Number of repeated full weight syncs; the same on all ranks."""
        return self.syncer.source.times_forgotten

    @property
    def adapter_number(self) -> int | None:
        """Number of the newest adapter in this node's engines; see `WeightSyncer.adapter_number`."""
        return self.syncer.adapter_number

    def require_full_sync(self) -> None:
        """Let the next `deliver` send the whole model and verify it. On every rank, but not collective."""
        self.forget_sent()
        self._must_verify = True

    def _end_sync(self, step: int, outcomes: Sequence[_Outcome]) -> WeightSyncReport:
        self._must_verify = False
        reports = [each.report for each in outcomes if each.report is not None]
        report, seconds = slowest(reports), [each.total_s for each in reports]
        self.total_s_by_node = [max(seconds[ranks.start : ranks.stop]) for ranks in self.groups.topology.nodes()]
        _log.debug("weight sync %d ends: policy version %d, %s", self._num_syncs, step, report)
        if report.gap is not None:
            self.verification = Verification(
                number=self._num_syncs, policy_version=step, gap=report.gap, limit=self.verifier.limit
            )
            if self.verifier.first_gap is None:
                self.verifier.first_gap = report.gap
                _log.info(
                    "the first weight sync is verified: log-probabilities differ by %s; the limit is %.2g from now on",
                    report.gap,
                    self.verifier.limit,
                )
        return report

    def _look_at_gap(self, outcomes: Sequence[_Outcome], sent_again: LogprobGap | None) -> LogprobGap | None:
        """Decide by the job's worst gap, the same on every rank.

        Returns:
            The gap, if the whole model has to be sent again.

        Raises:
            StepFailed: it was sent again, and the gap is still beyond the limit.
        """
        found = [(each.report.gap, each.doubt) for each in outcomes if each.report and each.report.gap]
        if not found:
            return None
        gap, doubt = max(found, key=lambda each: each[0].judged)
        verdict = self.verifier.judge(gap, was_sent_again=sent_again is not None)
        if verdict is GapVerdict.SEND_AGAIN:
            _log.info("%s: everything is sent once more", doubt, extra=FILE_ONLY)
            return gap
        if verdict is GapVerdict.END:
            assert doubt is not None
            raise StepFailed(doubt)
        if verdict is GapVerdict.WARN and gap.judged > WARNED_AGAIN_FACTOR * self._warned_of:
            self._warned_of = gap.judged
            _log.warning("WARNING: %s", doubt)
        if verdict is GapVerdict.PASS and sent_again is not None:
            _log.warning(
                "WARNING: log-probabilities of engine and trainer differed by %s, and by %s after the whole model was "
                "sent once more: something had not reached the engines",
                sent_again,
                gap,
            )
        return None

    def metrics(self) -> dict[str, float]:
        """Metrics of the whole job, counted from its start."""
        metrics = {"engine/restarts": float(len(self.restarts)), "weight_sync/repeats": float(self.num_repeats)}
        if self.restarts:
            metrics["engine/restart_s"] = self.restarts[-1].seconds
        return metrics

    def forget_sent(self) -> None:
        """Let the next weight sync send all weights, frozen ones included; on every rank."""
        self.syncer.source.forget_sent()

    def close(self) -> None:
        self.syncer.close()

    def _try_adapter(self, step: int) -> list[_Outcome] | None:
        """Sync and verify an adapter of noise; None if an engine was lost."""
        assert self.trial is not None
        with self.trial.noise() as limit:
            found = self._sync(step, True, limit=limit)
        return self._end_phase(*found)

    def _sync(
        self, step: int, is_verified: bool, *, limit: float | None = None, was_sent_again: bool = False
    ) -> tuple[EngineError | None, WeightSyncReport, FailureRecord | None]:
        """Sync and verify on this rank; returns (error, report, problem with the gap) for `_end_phase`.

        Args:
            limit: of the gap, instead of the verifier's; beyond it the job ends.
        """
        report, error = self.syncer.sync(step, checks_bits=is_verified or self.syncer.packs_on_gpu)
        found = None
        if is_verified:
            try:
                found = self.verifier.verify(self._num_syncs, engines_work=error is None)
            except EngineError as unverified:
                error = unverified
        if found is None:
            return error, report, None
        gap, client = found
        report = replace(report, gap=gap)
        verdict = self.verifier.judge(gap, limit=limit, was_sent_again=was_sent_again)
        if verdict is GapVerdict.PASS:
            _log.debug("weight sync %d is verified: a gap of %s", self._num_syncs, gap)
            return None, report, None
        what = self.verifier.statement(verdict, gap, self._num_syncs, limit=limit)
        if verdict is GapVerdict.REFUSE:
            return client.error(what, FailureKind.USER), report, None
        return None, report, self.watch.make_record(f"{client.name} {what}", kind=FailureKind.ENGINE)

    def _bring_back(self) -> None:
        """Wait until all engines of the job take work, and every node's weight sync group is open."""
        while True:
            arrivals = self._wait_for_engines()
            if written := sorted({name for each in arrivals for name in each.written}):
                _log.info("frozen parameters were written to, and are sent again: %s", some(written))
                self.syncer.source.send_again(written)
            came = [restart for each in arrivals for restart in each.restarts]
            if self._num_syncs and not came:
                return
            for restart in came:
                self.restarts.append(restart)
                _log.info("%s", restart, extra=FILE_ONLY)
                self.on_restart(restart)
            self.syncer.source.forget_sent()
            self._must_try = self.trial is not None
            self._must_verify = self._must_verify or bool(came)
            if self._open():
                return
            if self.engines.has_lost():
                self.engines.renew()  # the other engines of its node may wait for it in a group that never opens

    def _wait_for_engines(self) -> list[_Arrivals]:
        by_sums = is_due(self._num_syncs + 1)
        mine, failure = _Arrivals(written=tuple(self.syncer.source.written(by_sums=by_sums))), None
        if self.engines.has_lost():
            self._is_open = False
            with self.watch.during("engine restart"):
                try:
                    mine = replace(mine, restarts=tuple(self.engines.replace_lost()))
                    self._must_ask = True
                except StepFailed as error:
                    mine = _Arrivals(gone=error.record)
                    failure = error.record if self.watch.stop_was_asked() else None
        arrivals = self.groups.exchange(self.watch, failure, mine, _Arrivals)
        for each in arrivals:
            if each.gone is not None:
                raise StepFailed(each.gone)
        return arrivals

    def _open(self) -> bool:
        """Open missing weight sync groups, one per node; False if an engine was lost meanwhile."""
        error: Exception | None = None
        stuck = f"the weight sync group did not open within {self.timeout_s:.0f} s (vllm_sync_timeout) [GRPO-502]"
        with self.watch.during("weight sync group"):
            try:
                if not self._is_open:
                    # NCCL's own wait has no deadline. Other engines of the node may be generating.
                    with self.watch.within(self.timeout_s, lambda: stuck), self.syncer.at_rest():
                        if self._must_ask:
                            answer = ask_engines(self.engines.clients, self.syncer.source.question, self.timeout_s)
                            agreed([self.wire_format, answer])
                        self.syncer.connect()
                        _log.debug("the weight sync group of this node is open")
                    self._is_open, self._must_ask = True, False
            except JobFailed:
                raise  # the job has its record already
            except (OSError, RuntimeError) as problem:  # `EngineError` is a RuntimeError
                error = problem
            return self._end_phase(error) is not None

    def _end_phase(
        self, error: Exception | None, report: WeightSyncReport | None = None, doubt: FailureRecord | None = None
    ) -> list[_Outcome] | None:
        """Exchange the results of a phase between all ranks; None if one of them lost an engine."""
        failure, is_lost = None, False
        if error is not None:
            is_lost = self.engines.has_lost(DEATH_FOLLOWS_S)
            if not is_lost or self.watch.stop_was_asked():
                failure = self.watch.make_record(error)
        mine = _Outcome(is_lost=is_lost, report=report, doubt=doubt)
        outcomes = self.groups.exchange(self.watch, failure, mine, _Outcome)
        return None if any(each.is_lost for each in outcomes) else outcomes
