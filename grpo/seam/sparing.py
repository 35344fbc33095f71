"""Spare groups: batches sample more groups than they train on, and drop flat ones.

TRL 1.16 trains on all sampled groups. A flat group, whose completions all have the same reward, has advantages of 0 and
teaches nothing.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from grpo.faults.failure import FailureKind, FailureRecord, StepFailed
from grpo.rollout.spares import DealtRows, chosen_groups, deal, flat_groups
from grpo.seam.ordering import PromptOrder
from grpo.seam.run import JobRun
from grpo.seam.scoring import BatchRewards, Generate
from grpo.seam.view import TrainerView

_log = logging.getLogger(__name__)

FLAT_WINDOW = 20  # batches over which the share of flat groups is averaged
MOSTLY_FLAT = 0.5


class SpareGroups:
    """Sampling of `spare_groups` more groups per batch than are trained on; see `grpo.rollout.spares`."""

    def __init__(self, view: TrainerView, run: JobRun, order: PromptOrder, rewards: BatchRewards) -> None:
        self._view, self._run, self._order, self._rewards = view, run, order, rewards
        self._kept_rewards: torch.Tensor | None = None
        """Rewards of all ranks' rows to train on, [completions, functions], until TRL asks for them."""
        self._flat_shares: Sequence[float] = ()
        self._flat_batches = 0
        """Number of batches in a row with flat groups alone."""
        self._has_said_flat = False

    def sample(self, prompts: list[Any], generate: Generate, calculate: Callable[..., torch.Tensor]) -> Sequence[Any]:
        """Sample this rank's share of all groups, and return the rows that it trains on. Collective.

        Args:
            prompts: replaced in place by the prompts of these rows.
            generate: samples prompts; see `Generate`.
            calculate: returns the rewards of sampled rows, of all ranks.

        Raises:
            StepFailed: `max_flat_batches` batches in a row had only flat groups.
        """
        self._kept_rewards = None  # left by an unfinished batch
        view, inputs = self._view, self._rewards.inputs
        if not view.args.spare_groups or view.mode != "train" or len(inputs) != len(prompts):
            return generate(prompts)
        sampler = self._order.sampler
        assert sampler is not None, "refused for streams"
        assert isinstance(inputs, list), "TRL reads it again behind this (1.16)"
        rows = sampler.sampled_batch(*divmod(view.batch_number, sampler.num_batches))
        share, rank = len(rows) // view.accelerator.num_processes, view.accelerator.process_index
        sampled = [view.train_dataset[row] for row in rows[rank * share : (rank + 1) * share]]
        asked = [row["prompt"] for row in sampled]
        with self._rewards.of_batch(sampled):
            generated = generate(asked)
        _, completion_ids, tool_mask, completions, *_ = generated
        rewards = calculate(sampled, asked, completions, completion_ids)
        wanted = self._choose_rows(rewards)
        mine = self._deal_rows(completions, tool_mask, wanted)
        self._kept_rewards = rewards[torch.from_numpy(wanted).to(rewards.device)]
        inputs[:] = [view.train_dataset[rows[row]] for row in self._own_rows(wanted)]
        prompts[:] = [row["prompt"] for row in inputs]
        self._rewards.inputs = inputs
        return self._generated_rows(generated, prompts, mine)

    def take_rewards(self) -> torch.Tensor | None:
        """Return the rewards of a batch sampled with spare groups, once; None for other batches."""
        rewards, self._kept_rewards = self._kept_rewards, None
        return rewards

    def _own_rows(self, wanted: np.ndarray) -> list[int]:
        """Return this rank's part of the rows to train on."""
        return np.split(wanted, self._view.accelerator.num_processes)[self._view.accelerator.process_index].tolist()

    def _choose_rows(self, rewards: torch.Tensor) -> np.ndarray:
        """Return the numbers of the rows to train on. Equal on all ranks, as their rewards are equal."""
        size = self._view.args.num_generations
        found = rewards.float().cpu()
        if self._view.args.multi_objective_aggregation == "sum_then_normalize":
            unscored = found.isnan().all(1)
            found = (found * self._view.reward_weights.float().cpu()).nansum(1)
            found[unscored] = torch.nan
        is_flat = flat_groups(found.numpy().reshape(-1, size, found[0].numel()))
        chosen = chosen_groups(is_flat, len(is_flat) - self._view.args.spare_groups)
        self._note_flat(is_flat, chosen)
        return (chosen[:, None] * size + np.arange(size)).reshape(-1)

    def _note_flat(self, is_flat: np.ndarray, chosen: np.ndarray) -> None:
        share = float(is_flat.mean())
        self._view.note_metrics(
            {
                "spare_groups/frac_zero_std_sampled": share,
                "spare_groups/frac_zero_std_trained": float(is_flat[chosen].mean()),
                "spare_groups/used": float((chosen >= len(chosen)).sum()),
                "spare_groups/extra_completions": float((len(is_flat) - len(chosen)) * self._view.args.num_generations),
            }
        )
        self._flat_batches = self._flat_batches + 1 if is_flat.all() else 0
        if 0 < self._view.args.max_flat_batches <= self._flat_batches:
            cause = (
                f"{self._flat_batches} generation batches in a row (max_flat_batches) had no group whose completions "
                "have different rewards, so nothing is learnt any more [GRPO-618]: take other prompts, more "
                "num_generations, or a reward with more grades"
            )
            assert self._run.watch is not None, "of local mode"
            kind, host = FailureKind.USER, self._run.watch.host
            raise StepFailed(FailureRecord(node=0, rank=0, host=host, phase="train", cause=cause, kind=kind))
        self._flat_shares = [*self._flat_shares, share][-FLAT_WINDOW:]
        mean = sum(self._flat_shares) / len(self._flat_shares)
        if len(self._flat_shares) == FLAT_WINDOW and mean > MOSTLY_FLAT and not self._has_said_flat:
            self._has_said_flat = True
            if self._view.accelerator.is_main_process:
                _log.warning(
                    "WARNING: in %d batches %.0f %% of the sampled groups teach nothing: all completions of a "
                    "prompt have the same reward, and spare_groups (%d) can replace few of them; take prompts that are "
                    "neither too easy nor too hard, or more num_generations",
                    FLAT_WINDOW,
                    100 * mean,
                    self._view.args.spare_groups,
                )

    def _deal_rows(self, completions: Sequence[Any], tool_mask: Sequence[Any] | None, wanted: np.ndarray) -> DealtRows:
        """Move rows, with the fields that TRL needs, to the ranks that train on them. Collective."""
        batch, pending = self._view.engines.last_batch, self._view.pending_extra
        assert batch is not None, "it was sampled"
        extra = {name: values for name, values in pending.items() if len(values) == len(completions)}
        for name in extra:
            del pending[name]
        texts = [
            json.dumps(
                {
                    "completion": completion,
                    "mask": None if tool_mask is None else tool_mask[row],
                    "extra": {name: values[row] for name, values in extra.items()},
                },
                default=str,
            )
            for row, completion in enumerate(completions)
        ]
        return deal(self._run.groups, DealtRows(completions=batch.completions, texts=texts), wanted)

    def _generated_rows(self, generated: Sequence[Any], prompts: list[Any], mine: DealtRows) -> tuple[Any, ...]:
        """Return the dealt rows in the form of TRL's `_generate` (1.16)."""
        beside: list[Mapping[str, Any]] = [json.loads(text) for text in mine.texts]
        for name in {name for each in beside for name in each["extra"]}:
            self._view.pending_extra[name] = [each["extra"].get(name) for each in beside]
        prompt_ids = self._view.tokenize(prompts)
        completion_ids, logprobs = self._view.engines.keep(mine.completions, prompt_ids)
        mask = None if generated[2] is None else [each["mask"] for each in beside]
        completions = [each["completion"] for each in beside]
        return prompt_ids, completion_ids, mask, completions, logprobs, *generated[5:7], [[] for _ in beside]
