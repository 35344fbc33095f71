"""Between TRL's trainer and ours: rewards that begin when their completions are there."""

import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from trl.data_utils import is_conversational

from grpo.checkpoints.rank_state import random_states, restore_random_states
from grpo.faults.watch import FailureWatch
from grpo.place.log import EVERY_RANK
from grpo.rewards.batch import Rows
from grpo.rewards.scoring import Scoring
from grpo.rollout.turns.environments import home_of
from grpo.seam.engines import LocalEngines
from grpo.seam.observing import ObservedTrainer

_log = logging.getLogger(__name__)


def use_device(device: torch.device) -> None:
    """For a thread in which code of the user's runs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # which is each thread's own


class ScoringTrainer(ObservedTrainer):
    """A trainer whose reward functions run while it computes log-probabilities, or still samples."""

    _local: LocalEngines | None = None
    """In local mode, as `_watch`."""
    _watch: FailureWatch
    reward_funcs: list[Any]
    _scoring: Scoring | None = None
    _inputs: Sequence[Mapping[str, Any]] = ()
    """Of the batch that is being made."""
    _is_chat = False
    """Whether its prompts are messages."""
    _compares = True
    """Until functions were called beside the main thread and in it."""

    def _score_beside(self) -> None:
        """In local mode, after TRL's own `__init__`."""
        me = weakref.proxy(self)
        rank = self.accelerator.process_index
        self._scoring = Scoring(
            self.reward_funcs,
            self._watch,
            timeout_s=self.args.reward_timeout,
            beside=self.args.overlap_rewards,
            in_main_thread=self._asks_environments,
            loop=lambda: me.async_loop,
            timeline=self.timeline,
            prepare=partial(use_device, self.accelerator.device),
            say=partial(_log.warning, "rank %d: %s", rank, extra=EVERY_RANK),
        )

    def _asks_environments(self, func: Any) -> bool:
        """Whether it is given environments that live in the main thread, as `get_reward` in TRL's wrapper is (1.16)."""
        code = getattr(inspect.unwrap(func), "__code__", None)
        if not self.environment_factories or code is None or "environments" not in inspect.getargs(code).args:
            return False
        return any(home_of(each.reset) is None for pool in self._environment_pool.values() for each in pool)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._inputs = inputs
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._inputs = ()

    def _generate(self, prompts: Any) -> Any:
        """TRL's; rewards begin, at the latest, when it is over."""
        self._is_chat = is_conversational({"prompt": prompts[0]})
        if self._scoring is None:
            return super()._generate(prompts)
        if len(self._inputs) != len(prompts):  # a subclass may ask for completions alone
            return _with_messages(super()._generate(prompts))
        if not self._scoring.scores(self.reward_funcs):
            self._score_beside()  # they were changed
        groups = self._groups(len(prompts))
        self._scoring.begin(self._rows(self._inputs, prompts), groups)
        generated = _with_messages(super()._generate(prompts))
        _, completion_ids, _, completions, _, more, *_ = generated
        rows = self._rows(_with_fields(self._inputs, more), prompts)
        self._scoring.start(rows, completions, completion_ids, groups, refused=self._refused)
        return generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """TRL's; rows whose prompts no engine took are shown to no function, and have no reward."""
        if self._scoring is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        rows = self._rows(inputs, prompts)
        if not self._scoring.is_of(
            self.reward_funcs, rows, completions, completion_ids_list
        ):  # of a subclass, or changed
            if not self._scoring.scores(self.reward_funcs):  # they were changed, or a subclass has changed the rows
                self._score_beside()
            groups = self._groups(len(prompts))
            self._scoring.begin(rows, groups)
            self._scoring.start(rows, completions, completion_ids_list, groups, refused=self._refused)
        if self._compares and self.args.overlap_rewards and self.args.check_rewards:
            self._compares = False
            self._compare_threads(self._scoring)
        functions, self.reward_funcs = self.reward_funcs, self._scoring.stand_ins()
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions
        if (refused := self._refused) is not None:
            rewards[self.accelerator.gather(torch.tensor(refused, device=rewards.device))] = torch.nan
        return rewards

    def _compare_threads(self, scoring: Scoring) -> None:
        """A function that one rank has to call in the main thread is called there by all. Collective over the job."""
        states = random_states()
        mine = torch.tensor(scoring.compare(), device=self.accelerator.device)
        restore_random_states(states)
        of_ranks = self.accelerator.gather(mine).reshape(-1, len(mine)).tolist()
        ranks = ", ".join(str(rank) for rank, found in enumerate(of_ranks) if any(found))
        why = f"needs the main thread, or gives other rewards beside it, as rank {ranks} has found [GRPO-210]"
        wanted = [number for number in range(len(mine)) if any(found[number] for found in of_ranks)]
        scoring.move(wanted, why if self.accelerator.is_main_process else None)

    @property
    def batch_rows(self) -> Sequence[Mapping[str, Any]]:
        """This rank's rows of the batch that is being made: one for each completion, with all columns of the data."""
        return self._inputs

    @property
    def _refused(self) -> list[bool] | None:
        return None if self._local is None else self._local.refused_rows

    def _rows(self, inputs: Sequence[Mapping[str, Any]], prompts: Sequence[Any]) -> Rows:
        return Rows(inputs, prompts, self.environments, self.state)

    def _groups(self, num_rows: int) -> list[list[int]]:
        """This rank's rows of each prompt."""
        size = self.num_generations if self.model.training else self.num_generations_eval
        first = self.accelerator.process_index * num_rows
        groups = defaultdict(list)
        for row in range(num_rows):
            groups[(first + row) // size].append(row)
        return [*groups.values()]


def _with_messages(generated: Sequence[Any]) -> Sequence[Any]:
    """What TRL generates, with the messages that a rollout function gives in place of the decoded tokens."""
    prompt_ids, completion_ids, mask, completions, logprobs, more, *pictures = generated
    if (messages := more.pop("completions", None)) is not None:
        completions = [own if each is None else each for own, each in zip(completions, messages, strict=True)]
    return prompt_ids, completion_ids, mask, completions, logprobs, more, *pictures


def _with_fields(inputs: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with what a rollout function gives beside its completions, as TRL merges it (1.16)."""
    rows = []
    for number, row in enumerate(inputs):
        own = {name: values for name, values in fields.items() if not isinstance(values, list)}
        own |= {
            name: values[number] for name, values in fields.items() if isinstance(values, list) and number < len(values)
        }
        rows.append({**row, **own})
    return rows
