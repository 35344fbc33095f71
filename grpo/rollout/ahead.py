"""Generation batches in the order in which training asks for them, sampled when it does or one ahead."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grpo.rollout.node import NodeSampler, Pending
from grpo.rollout.packing import Completions, PackedRows, seed_base
from grpo.rollout.report import GenerationReport, PolicyLag

_OTHER_PROMPTS = (
    "the prompts that were sampled ahead are not those that training asks for now [GRPO-611]: the data set, its "
    "transform or the data loader gives other rows when it is read again; set generation_lookahead to 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training stands."""

    step: int
    """Optimizer steps that are done."""
    mode: str
    """`train` or `eval`."""
    versions: int
    """Policy versions that the engines have had."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationBatch:
    """The completions of this rank's prompts, and where they come from."""

    completions: Completions
    reports: list[GenerationReport]
    """Of each node."""
    policy_version: int
    """Optimizer steps of the weights that it was submitted to; of each completion: `Completions.policy_versions`."""
    lag: PolicyLag
    """When the batch is first used."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Submitted:
    rows: PackedRows
    pending: Pending | None
    at: Progress
    collected: tuple[Completions, list[GenerationReport]] | None = None


class GenerationBatches:
    """Gives training its generation batches. Every rank has one; methods are collective over the job but for `drop`.

    Args:
        seed: the training seed.
        user_seed: a sampling seed of the user's, if any.
        progress: where training stands now; the same on every rank.
    """

    def __init__(
        self, sampler: NodeSampler, *, seed: int, user_seed: int | None, progress: Callable[[], Progress]
    ) -> None:
        self._sampler = sampler
        self._seed, self._user_seed = seed, user_seed
        self._progress = progress
        self._draws: dict[str, tuple[int, int]] = {}  # by mode: the last step, and its batches so far
        self._ahead: _Submitted | None = None

    def take(self, rows: PackedRows) -> GenerationBatch:
        """The completions of these prompts: of the batch that was sampled ahead, in training, or sampled now.

        Raises:
            JobFailed: on every rank, when an engine failed on any node.
            RuntimeError: what was sampled ahead is not what is asked for.
        """
        now = self._progress()
        if now.mode == "train" and self._ahead is not None:
            submitted, self._ahead = self._ahead, None
            if not _are_equal(submitted.rows, rows):
                raise RuntimeError(_OTHER_PROMPTS)
        else:
            submitted = self._submit(rows)
        completions, reports = self._collect(submitted)
        old_share = 1 - sum(each.num_renewed for each in reports) / max(1, sum(r.num_completions for r in reports))
        return GenerationBatch(
            completions=completions,
            reports=reports,
            policy_version=submitted.at.step,
            lag=PolicyLag(
                versions=(now.versions - submitted.at.versions) * old_share,
                steps=(now.step - submitted.at.step) * old_share,
            ),
        )

    def sample_ahead(self, rows: PackedRows) -> None:
        """Start with the batch that training takes next."""
        self._ahead = self._submit(rows)

    def wait(self) -> None:
        """Until the batch that is sampled ahead, if there is one, has all its completions.

        Before a push: a completion is of one policy version, and engines drop their prefix cache only at rest.
        """
        if self._ahead is not None:
            self._collect(self._ahead)

    def drop(self) -> None:
        """Forget the batch that is sampled ahead. On every rank, but not collective."""
        if self._ahead is not None:
            self._sampler.drop(self._ahead.pending)
        self._ahead = None

    def _collect(self, submitted: _Submitted) -> tuple[Completions, list[GenerationReport]]:
        if submitted.collected is None:
            submitted.collected = self._sampler.collect(submitted.pending)
        return submitted.collected

    def next_base_seed(self) -> tuple[Progress, int]:
        """Where training stands, and the seed of the batch that is sampled next; see `seed_base`."""
        now = self._progress()
        last_step, draws = self._draws.get(now.mode, (now.step, 0))
        draw = draws if last_step == now.step else 0
        self._draws[now.mode] = (now.step, draw + 1)
        return now, seed_base(seed=self._seed, step=now.step, mode=now.mode, draw=draw, user_seed=self._user_seed)

    def _submit(self, rows: PackedRows) -> _Submitted:
        now, base = self.next_base_seed()
        return _Submitted(rows=rows, pending=self._sampler.submit(rows, base), at=now)


def _are_equal(one: PackedRows, other: PackedRows) -> bool:
    return np.array_equal(one.lengths, other.lengths) and np.array_equal(one.token_ids, other.token_ids)
