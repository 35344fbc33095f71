"""Rewards of a batch, started as soon as completions arrive."""

import contextlib
import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from trl.data_utils import is_conversational

from grpo.checkpoints.rank_state import random_states, restore_random_states
from grpo.place.log import EVERY_RANK
from grpo.record.timeline.records import SCORE
from grpo.rewards.batch import Rows
from grpo.rewards.scoring import Scoring
from grpo.rollout.turns.environments import home_of
from grpo.rollout.turns.episode import Episode
from grpo.rollout.turns.rollouts import OnEnd
from grpo.seam.observing import Timing
from grpo.seam.run import JobRun
from grpo.seam.view import Batch, TrainerView

_log = logging.getLogger(__name__)

Inputs = Sequence[Mapping[str, Any]]
Generate = Callable[[list[Any]], Sequence[Any]]
"""TRL's `_generate`: takes prompts; returns prompt ids, completion ids, tool mask, completions and so on."""


def use_device(device: torch.device) -> None:
    """Set the CUDA device of a thread that runs the user's code."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # it is set per thread


class BatchRewards:
    """Reward functions of the batch being sampled: they run while other completions are sampled or scored by models.

    TRL calls stand-ins that return their results. The stand-ins replace `reward_funcs` only during that call, not from
    construction on: TRL names and loads the functions it is given, and users may change `reward_funcs` later.
    """

    def __init__(self, view: TrainerView, run: JobRun, timing: Timing) -> None:
        self._view, self._run, self._timing = view, run, timing
        self.inputs: Sequence[Mapping[str, Any]] = ()
        """This rank's rows of the batch, one per completion, with all columns of the data set."""
        self.is_chat = False
        """True if its prompts are messages."""
        self._compares = True
        """True until functions have been compared outside and inside the main thread."""
        self._scoring: Scoring | None = None
        self._ahead: dict[int, Scoring] = {}
        """Scoring of later batches, by batch number."""

    @property
    def scoring(self) -> Scoring:
        """Scoring by the trainer's present reward functions, in local mode."""
        args, accelerator, functions = self._view.args, self._view.accelerator, self._view.reward_funcs
        if self._scoring is not None and self._scoring.scores(functions):
            return self._scoring
        assert self._run.watch is not None, "of local mode"
        self._scoring = Scoring(
            functions,
            self._run.watch,
            timeout_s=args.reward_timeout,
            beside=args.overlap_rewards,
            ahead=args.generation_lookahead > 0,
            in_main_thread=self._asks_environments,
            loop=self._loop,
            timeline=self._timing.timeline,
            prepare=partial(use_device, accelerator.device),
            say=partial(_log.warning, "rank %d: %s", accelerator.process_index, extra=EVERY_RANK),
        )
        return self._scoring

    def _loop(self) -> Any:
        return self._view.async_loop

    def _asks_environments(self, func: Any) -> bool:
        """True if the function takes environments of the main thread, as TRL's `get_reward` wrapper does
        (1.16)."""
        code = getattr(inspect.unwrap(func), "__code__", None)
        if not self._view.environment_factories or code is None or "environments" not in inspect.getargs(code).args:
            return False
        return any(home_of(each.reset) is None for pool in self._view.environment_pool.values() for each in pool)

    @contextlib.contextmanager
    def of_batch(self, inputs: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Hold the rows of a batch while it is sampled."""
        self.inputs = inputs
        try:
            yield
        finally:
            self.inputs = ()

    def sample(self, generate: Generate, prompts: list[Any]) -> Sequence[Any]:
        """Sample by TRL's `_generate`, and start the rewards, at the latest when all completions have arrived."""
        self.is_chat = is_conversational({"prompt": prompts[0]})
        if len(self.inputs) != len(prompts):  # a subclass may ask for completions alone
            return _with_messages(generate(prompts))
        ahead = self._ahead.pop(self._view.batch_number, None) if self._view.mode == "train" else None
        if ahead is None:
            self.scoring.begin(self._rows(self.inputs, prompts), self._groups(len(prompts)))
        else:
            self.scoring.drop()
            self._scoring = ahead
        generated = _with_messages(generate(prompts))
        _, completion_ids, _, completions, _, more, *_ = generated
        self._start(self._rows(_with_fields(self.inputs, more), prompts), completions, completion_ids)
        return generated

    def begin_ahead(self, number: int, read: Callable[[], Inputs | None]) -> OnEnd | None:
        """Prepare scoring of a later batch's completions as they arrive.

        Args:
            number: number of the batch.
            read: returns this rank's rows of it; None if training ends before.

        Returns:
            A function to call with each completion; None if no reward function may run so early.
        """
        if not self.scoring.starts_early or (inputs := read()) is None:
            return None
        view, state = self._view, copy.copy(self._view.state)
        steps = (number - view.batch_number) * view.steps_per_batch // view.args.gradient_accumulation_steps
        state.global_step += steps
        rows = Rows(inputs, [row["prompt"] for row in inputs], None, state)
        scoring = self._ahead[number] = self.scoring.of_later_batch(rows, self._groups(len(rows)))
        return partial(self.add, scoring)

    def drop_ahead(self, number: int) -> None:
        """Drop the scoring of a later batch that training will not use."""
        if (scoring := self._ahead.pop(number, None)) is not None:
            scoring.drop()

    def add(self, scoring: Scoring, row: int, episode: Episode) -> None:
        """Score the completion of an episode that has ended. From any thread."""
        if episode.refusal is None:
            completion = episode.messages if self.is_chat else episode.messages[0]["content"]
            scoring.add(row, completion, episode.token_ids)

    def calculate(
        self, call: Callable[..., torch.Tensor], inputs: Any, prompts: Any, completions: Any, completion_ids: Any
    ) -> torch.Tensor:
        """Return the rewards of all ranks by TRL's `_calculate_rewards`, [completions, functions]. Collective.

        Rows refused by the engines are passed to no function; their rewards are NaN.
        """
        refused = self._view.engines.refused_rows
        rows, functions = self._rows(inputs, prompts), self._view.reward_funcs
        if not self.scoring.is_of(functions, rows, completions, completion_ids):  # a subclass has changed them
            self.scoring.begin(rows, self._groups(len(prompts)))
            self._start(rows, completions, completion_ids)
        args, self._compares, compares = self._view.args, False, self._compares
        if compares and args.overlap_rewards and args.check_rewards:
            self._compare_threads()
        self._view.reward_funcs = self.scoring.stand_ins()
        try:
            with self._timing.timeline.rest(SCORE):  # reward models, and the wait for other ranks' rewards
                rewards = call(inputs, prompts, completions, completion_ids)
        finally:
            self._view.reward_funcs = functions
        if refused is not None:
            rewards[self._view.accelerator.gather(torch.tensor(refused, device=rewards.device))] = torch.nan
        return rewards

    def _start(self, rows: Rows, completions: Any, completion_ids: Any) -> None:
        groups, refused = self._groups(len(rows)), self._view.engines.refused_rows
        self.scoring.start(rows, completions, completion_ids, groups, refused=refused)

    def leave_out_refused(self, scored: Batch) -> None:
        """Take rows refused by the engines out of the loss. Collective if there are any."""
        if (refused := self._view.engines.refused_rows) is not None:
            scored["completion_mask"][refused] = 0
            counted = scored["completion_mask"] * scored.get("tool_mask", 1)
            scored["num_items_in_batch"] = self._view.accelerator.gather(counted.sum()).sum()  # as TRL does (1.16)

    def _compare_threads(self) -> None:
        """Compare functions inside and outside the main thread; one that needs it on any rank runs in it on all ranks.
        Collective over the job."""
        accelerator = self._view.accelerator
        states = random_states()
        mine = torch.tensor(self.scoring.compare(), device=accelerator.device)
        restore_random_states(states)
        of_ranks = accelerator.gather(mine).reshape(-1, len(mine)).tolist()
        ranks = ", ".join(str(rank) for rank, found in enumerate(of_ranks) if any(found))
        why = f"needs the main thread, or gives other rewards beside it, as rank {ranks} has found [GRPO-210]"
        wanted = [number for number in range(len(mine)) if any(found[number] for found in of_ranks)]
        self.scoring.move(wanted, why if accelerator.is_main_process else None)

    def _rows(self, inputs: Sequence[Mapping[str, Any]], prompts: Sequence[Any]) -> Rows:
        return Rows(inputs, prompts, self._view.environments, self._view.state)

    def _groups(self, num_rows: int) -> list[list[int]]:
        """Return this rank's rows, grouped by prompt."""
        first = self._view.accelerator.process_index * num_rows
        groups = defaultdict(list)
        for row in range(num_rows):
            groups[(first + row) // self._view.group_size].append(row)
        return [*groups.values()]


def _with_messages(generated: Sequence[Any]) -> Sequence[Any]:
    """Return TRL's output with a rollout function's messages, where given, in place of decoded completions."""
    prompt_ids, completion_ids, mask, completions, logprobs, more, *pictures = generated
    if (messages := more.pop("completions", None)) is not None:
        completions = [own if each is None else each for own, each in zip(completions, messages, strict=True)]
    return prompt_ids, completion_ids, mask, completions, logprobs, more, *pictures


def _with_fields(inputs: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows with a rollout function's extra fields, merged as in TRL (1.16)."""
    rows = []
    for number, row in enumerate(inputs):
        own = {name: values for name, values in fields.items() if not isinstance(values, list)}
        own |= {
            name: values[number] for name, values in fields.items() if isinstance(values, list) and number < len(values)
        }
        rows.append({**row, **own})
    return rows
