"""Generation batches in training's order, sampled on request or before it (asynchronous generation)."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from grpo.rollout.node import NodeSampler, Pending
from grpo.rollout.packing import (
    REFUSED,
    UNFINISHED,
    Completions,
    PackedRows,
    concat_completions,
    concat_rows,
    pack_rows,
    seed_base,
    split_completions,
    unpack_rows,
)
from grpo.rollout.partial import Kept
from grpo.rollout.prompts import Prompts
from grpo.rollout.report import GenerationReport, PolicyLag

_log = logging.getLogger(__name__)

POLL_S = 0.2
OTHER_PROMPTS = (
    "training's prompts are not those of the batch that was sampled for it [GRPO-611]: the data set, its transform or "
    "the data loader gives other rows when it is read again; set generation_lookahead to 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of training."""

    step: int
    """Finished optimizer steps."""
    mode: str
    """One of: `train`, `eval`."""
    versions: int
    """Number of policy versions the engines have had."""
    batch: int = 0
    """Number of the generation batch requested now, from 0 over the whole run."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling arguments of vLLM for evaluation, overriding training's."""

    @property
    def number(self) -> int:
        """Number that determines the seed of the batch requested now."""
        return self.batch if self.mode == "train" else self.step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationBatch:
    """Completions of this rank's prompts, and their origin."""

    completions: Completions
    reports: list[GenerationReport]
    """Reports of all nodes."""
    policy_version: int
    """Optimizer steps of the weights at submission; for each completion see `Completions.policy_versions`."""
    lag: PolicyLag
    """Policy lag at the batch's first use."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Submitted:
    prompts: Prompts
    number: int
    pending: Pending | None
    at: Progress
    collected: tuple[Completions, list[GenerationReport]] | None = None

    def kept(self, versions: int, completions: Completions) -> dict[str, Any]:
        reports = [] if self.collected is None else self.collected[1]
        return {
            "number": self.number,
            "step": self.at.step,
            "lag": versions - self.at.versions,
            "prompts": torch.from_numpy(self.prompts.rows.to_message()),
            "completions": torch.from_numpy(completions.to_message()),
            "reports": [report.dumps() for report in reports],
        }

    @staticmethod
    def resumed(kept: Mapping[str, Any], now: Progress) -> "_Submitted":
        """Restore a submitted batch; without reports it is incomplete, and has to be submitted again."""
        reports = [GenerationReport.loads(text) for text in kept["reports"]]
        return _Submitted(
            prompts=Prompts(rows=PackedRows.from_message(kept["prompts"].numpy())),
            number=kept["number"],
            pending=None,
            at=replace(now, step=kept["step"], versions=now.versions - kept["lag"]),
            collected=(Completions.from_message(kept["completions"].numpy()), reports),
        )


@dataclass(eq=False)
class GenerationBatches:
    """Provides training with generation batches. Every rank has one; all methods except `drop` are collective over the
    job.

    With a lookahead of 1, the next batch is sampled during training. With N >= 2, N batches are always in progress: the
    one training takes or waits for, and those after it. Their order is fixed at submission, and none is skipped.
    """

    sampler: NodeSampler
    _: KW_ONLY
    seed: int
    """The training seed."""
    user_seed: int | None
    """A sampling seed of the user's, if any."""
    progress: Callable[[], Progress]
    """Returns training's progress; the same on every rank."""
    lookahead: int = 0
    """Number of batches sampled before training requests them."""
    prompts_of: Callable[[int], Prompts | None] = lambda number: None
    """Returns this rank's prompts of the generation batch with this number; None, on every rank, after the end of
    training."""
    any_rank: Callable[[bool], bool] = bool
    """Logical or over all ranks."""
    in_flight: bool = False
    """Weight syncs run during generation: then a checkpoint does not wait for completions."""
    continues: bool = True
    """An engine can continue a completion after tokens sampled by another one."""

    def __post_init__(self) -> None:
        self._draws: dict[str, tuple[int, int]] = {}  # by mode: the last batch or step, and its generations so far
        self._under_way: deque[_Submitted] = deque()

    def take(self, prompts: Prompts) -> GenerationBatch:
        """Return completions of these prompts: in training from the oldest batch in progress, else sampled now.

        Raises:
            JobFailed: on every rank, if an engine failed on any node.
            RuntimeError: the prompts of the batch in progress differ from the requested ones.
        """
        now = self.progress()
        if now.mode == "train" and self._under_way:
            submitted = self._under_way.popleft()
            if not _are_equal(submitted.prompts, prompts):
                raise RuntimeError(OTHER_PROMPTS)
        else:
            submitted = self._submit(prompts, now.number)
        if now.mode == "train":
            self._fill(now, self.lookahead - 1)
        completions, reports = self._collect(submitted)
        return GenerationBatch(
            completions=completions,
            reports=reports,
            policy_version=submitted.at.step,
            lag=PolicyLag.of(
                reports, versions=now.versions - submitted.at.versions, steps=now.step - submitted.at.step
            ),
        )

    def sample_ahead(self) -> None:
        """Start sampling the following batches, up to the lookahead; call it after `take`."""
        if (now := self.progress()).mode == "train":
            self._fill(now, self.lookahead)

    def _fill(self, now: Progress, num_batches: int) -> None:
        while len(self._under_way) < num_batches:
            number = (self._under_way[-1].number if self._under_way else now.batch) + 1
            if (prompts := self.prompts_of(number)) is None:
                return
            self._under_way.append(self._submit(prompts, number))

    def wait(self) -> None:
        """Wait until all batches in progress are complete.

        Called before weight syncs that need idle engines: with a lookahead of 1 a completion has one policy version.
        """
        for submitted in self._under_way:
            self._collect(submitted)

    def kept(self, *, versions: int, gives_up: Callable[[], bool]) -> list[dict[str, Any]]:
        """Return the batches in progress for a checkpoint, this rank's rows: tensors, numbers and text.

        Unfinished completions are kept with their tokens so far, and continue after a resume: sampling them again would
        favour short ones. Batches that would make training fail are not kept: a resumed job would fail too.

        Args:
            versions: number of policy versions the engines will have had when training takes the next batch.
            gives_up: called repeatedly; True if there is no time to wait.

        Returns:
            An empty list if some are unfinished and cannot continue.
        """
        are_whole = True
        while self.any_rank(any(not self.sampler.is_finished(each.pending) for each in self._under_way)):
            is_stuck = any(self.sampler.is_stuck(each.pending) for each in self._under_way)
            if self.in_flight or self.any_rank(gives_up() or is_stuck):
                are_whole = False
                break
            time.sleep(POLL_S)
        if are_whole:
            self.wait()
        elif not self.continues:
            _log.info("the checkpoint is made without the batches under way: a resume samples them again")
            return []
        parts = iter(self.sampler.so_far([each.pending for each in self._under_way if each.collected is None]))
        found = [next(parts) if each.collected is None else each.collected[0] for each in self._under_way]
        reports = [report for each in self._under_way if each.collected is not None for report in each.collected[1]]
        is_bad = any(report.not_finite or report.num_refused for report in reports) or any(
            (each.engines == REFUSED).any() or not np.isfinite(each.engine_logprobs).all() for each in found
        )
        if self.any_rank(is_bad):
            return []
        ended = sum(int((each.engines != UNFINISHED).sum()) for each in found)
        num_rows = sum(each.num_completions for each in found)
        _log.debug("the checkpoint keeps %d completions under way, of which %d have ended", num_rows, ended)
        return [each.kept(versions, part) for each, part in zip(self._under_way, found, strict=True)]

    def resume(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Continue the batches from `kept`, if training requests the same ones; call it before `take` and after its
        weight sync."""
        if not kept:
            return
        now = self.progress()
        try:
            found = [_Submitted.resumed(each, now) for each in kept]
        except (KeyError, ValueError):  # of another version of this project
            found = []
        fits = bool(found) and [each.number for each in found] == [*range(now.batch, now.batch + len(found))]
        for each in found:
            prompts = self.prompts_of(each.number) if fits else None
            fits = prompts is not None and _are_equal(prompts, each.prompts)
        if self.any_rank(not fits):
            _log.info("the checkpoint's batches under way are not those that training asks for: others are sampled")
            return
        for each in found:
            assert each.collected is not None, "it comes with its completions"
            if not each.collected[1]:
                seed = self.base_seed(now.mode, each.number)
                lag = now.versions - each.at.versions
                held = Kept(completions=each.collected[0], step=each.at.step, lag=lag)
                each.collected = None
                order = order_of(now.mode, each.number)
                each.pending = self.sampler.submit(each.prompts, seed, order=order, kept=held)
            self._under_way.append(each)

    def drop(self) -> None:
        """Drop the batches of asynchronous generation. On every rank, but not collective."""
        for submitted in self._under_way:
            self.sampler.drop(submitted.pending)
        self._under_way.clear()

    def _collect(self, submitted: _Submitted) -> tuple[Completions, list[GenerationReport]]:
        if submitted.collected is None:
            submitted.collected = self.sampler.collect(submitted.pending)
        return submitted.collected

    def now(self) -> Progress:
        """Progress of training."""
        return self.progress()

    def base_seed(self, mode: str, number: int) -> int:
        """Seed of a batch with this number, or an evaluation at this step, sampled now; see `seed_base`."""
        last, draws = self._draws.get(mode, (number, 0))
        draw = draws if last == number else 0
        self._draws[mode] = (number, draw + 1)
        return seed_base(seed=self.seed, number=number, mode=mode, draw=draw, user_seed=self.user_seed)

    def _submit(self, prompts: Prompts, number: int) -> _Submitted:
        now = self.progress()
        order = order_of(now.mode, number)
        pending = self.sampler.submit(prompts, self.base_seed(now.mode, number), order=order, sampling=now.sampling)
        return _Submitted(prompts=prompts, number=number, pending=pending, at=now)


def order_of(mode: str, number: int) -> int:
    """Return `Batch.order`: evaluations come first, since ranks wait for them."""
    return number + 1 if mode == "train" else 0


def dealt(kept: Sequence[Sequence[Mapping[str, Any]]], ranks: int) -> list[list[dict[str, Any]]]:
    """Redistribute the results of `GenerationBatches.kept` from all ranks to `ranks` ranks, keeping the order of
    rows."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for parts in zip(*kept, strict=True):  # of one batch
        prompts = unpack_rows(concat_rows([PackedRows.from_message(part["prompts"].numpy()) for part in parts]))
        completions = concat_completions([Completions.from_message(part["completions"].numpy()) for part in parts])
        size = len(prompts) // ranks
        for rank, of_rank in enumerate(split_completions(completions, [size] * ranks)):
            rows = pack_rows(prompts[rank * size : (rank + 1) * size])
            messages = {"prompts": rows.to_message(), "completions": of_rank.to_message()}
            tensors = {name: torch.from_numpy(message) for name, message in messages.items()}
            found[rank].append({**parts[0], **tensors})
    return found


def _are_equal(one: Prompts, other: Prompts) -> bool:
    """Compare text prompts; asynchronous generation takes no prompts with images."""
    rows, others = one.rows, other.rows
    return np.array_equal(rows.lengths, others.lengths) and np.array_equal(rows.token_ids, others.token_ids)
