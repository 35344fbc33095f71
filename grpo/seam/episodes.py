"""Between TRL's trainer and ours: tools, environments and rollout functions, on the node's own engines."""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from trl.chat_template_utils import parse_response

from grpo.model.messages import MessageTemplate
from grpo.place.log import EVERY_RANK, LOGS_FOLDER, log_name
from grpo.rollout.agents.rollout import AgentBatch, AgentRollout
from grpo.rollout.turns.environments import in_their_threads
from grpo.rollout.turns.episode import Episode, EpisodeLimits
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.rollouts import EpisodeRow, Rollouts, as_trl_takes_them
from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import Message, Toolbox, ToolRunner
from grpo.seam.episodes_ahead import EpisodesAhead
from grpo.seam.scoring import ScoringTrainer, use_device

_log = logging.getLogger(__name__)


class _TrainersTemplate:
    """Messages and tokens as TRL has them (1.16), for episodes that go on side by side."""

    def __init__(self, trainer: "EpisodesTrainer") -> None:
        self._trainer = weakref.proxy(trainer)

    def parse(self, token_ids: list[int], *, prefix: list[int], schema: Any) -> Message:
        trainer = self._trainer
        tokenizer = trainer._tokenizer
        templates = [getattr(tokenizer, name, None) for name in ("response_template", "response_schema")]
        if not trainer._is_chat or templates == [None, None]:
            text = trainer.processing_class.decode(token_ids, skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        return parse_response(tokenizer, token_ids, prefix=prefix, tools=schema)

    def tool_suffix(self, messages: list[Message]) -> list[int]:
        return self._trainer._get_tool_suffix_ids(messages)


class EpisodesTrainer(ScoringTrainer):
    """A trainer whose ranks may ask their engines as often as they like."""

    rollout_func: Any
    _rollouts: Rollouts | None = None
    _ahead: EpisodesAhead
    _agent_template: MessageTemplate | None = None
    _resetting = ExitStack()

    def _with_threads(self, factories: Any, args: Any) -> Any:
        """`environment_factory`, before TRL's own `__init__`: its environments live where `max_tool_threads` says."""
        prepare = partial(use_device, args.device)
        return in_their_threads(factories, of_all=args.max_tool_threads is not None, prepare=prepare)

    def _take_rollouts(self) -> Rollouts | None:
        """What makes several turns of a prompt, and of a rollout function one that the other ranks know of, or brings
        each completion to rewards that wait for it; None where a rank's completions come all at once. After TRL's own
        `__init__`."""
        args, rank = self.args, self.accelerator.process_index
        is_early = self._scoring is not None and self._scoring.starts_early
        comes_at_once = not is_early or args.generation_lookahead or args.balances_nodes
        if comes_at_once and not self.tools and self.rollout_func is None:
            return None
        is_function = self.rollout_func is not None
        func = self.rollout_func
        agents = func if isinstance(func, AgentRollout) else None
        if is_function:
            self.rollout_func = self._together(self.rollout_func)
        trainer = weakref.proxy(self)

        def rows_of(prompts: Sequence[list[int]]) -> list[EpisodeRow]:
            return [trainer._episode_row(row, ids) for row, ids in enumerate(prompts)]

        def on_end(row: int, episode: Episode) -> None:
            if episode.refusal is None:
                completion = episode.messages if trainer._is_chat else episode.messages[0]["content"]
                trainer._scoring.add(row, completion, episode.token_ids)

        self._ahead = EpisodesAhead(trainer, func)
        prepare = partial(use_device, self.accelerator.device)
        self._rollouts = Rollouts(
            limits=self._episode_limits,
            tools=ToolRunner(
                timeout_s=args.tool_timeout,
                main=MainThread(),
                max_threads=args.max_tool_threads,
                max_abandoned=args.max_abandoned_tools,
                say=partial(_log.warning, "rank %d: %s", rank, extra=EVERY_RANK),
                prepare=prepare,
            ),
            is_function=is_function,
            prepare=prepare,
            template=_TrainersTemplate(self),
            rows_of=rows_of,
            planned=self._ahead.planned,
            on_end=on_end if is_early and not args.generation_lookahead else None,
            loop=getattr(self, "async_loop", None),
            func=agents,
        )
        return self._rollouts

    def _episode_row(self, row: int, token_ids: list[int]) -> EpisodeRow:
        """Of the batch that is being made."""
        toolbox, schema = None, self.tools
        if self.tools:
            toolbox = Toolbox(sync=self._sync_tool_dicts[row], asynchronous=self._async_tool_dicts[row])
        if self.environment_factories is not None:
            schema = self._env_tools[self._batch_environments[row]]
        return EpisodeRow.of(token_ids, toolbox, schema)

    @property
    def _episode_limits(self) -> EpisodeLimits:
        return EpisodeLimits(
            max_completion_tokens=self.max_completion_length,
            max_turn_tokens=(self.args.generation_kwargs or {}).get("max_tokens") or self.max_completion_length,
            max_tool_turns=self.max_tool_calling_iterations,
        )

    def agent_batch(
        self, prompts: Sequence[Any], rows: Sequence[Any] | None = None, sampler: Sampler | None = None
    ) -> AgentBatch:
        """Inside of a rollout function: what `grpo.agents` needs of the batch that is being made.

        Args:
            prompts: of this rank's rows, as TRL gives them to the rollout function.
            rows, sampler: of another batch.
        """
        engines, args, rank = self._local, self.args, self.accelerator.process_index
        if engines is None:
            raise TypeError("grpo.agents asks the node's own engines: set vllm_mode to 'local'")
        if self._agent_template is None:
            self._agent_template = MessageTemplate(self.processing_class, self.chat_template_kwargs)
        rows = self.batch_rows if rows is None else rows
        sampler = engines.sampler if sampler is None else sampler
        place, folder = self.topology, Path(args.output_dir) / LOGS_FOLDER
        return AgentBatch(
            rows=rows if len(rows) == len(prompts) else [{"prompt": prompt} for prompt in prompts],
            is_chat=self._is_chat,
            sampler=sampler,
            template=self._agent_template,
            limits=self._episode_limits.under(sampler.sampling),
            timeout_s=args.agent_timeout or args.rollout_timeout / 2,
            max_at_once=args.max_agents_at_once,
            max_failed=args.max_failed_agents,
            host=args.agent_host,
            log=folder / log_name("agents", node=place.node, index=rank, attempt=self.attempt),
            covers=self._watch.covers,
            uncovers=self._watch.uncovers,
            say=partial(_log.warning, "rank %d: %s", rank, extra=EVERY_RANK),
            prepare=partial(use_device, self.accelerator.device),
            end_token=self.eos_token_ids[0],
        )

    def _together(self, func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        me = weakref.ref(self)

        def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            own = me()
            assert own is not None, "TRL calls it in a generation"
            engines = own._local
            assert engines is not None, "of local mode"
            output = engines.roll_out(lambda: func(prompts, trainer), prompts)
            own.note_sampling(engines)
            return output

        return rollout

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's; `reset` has a deadline, and an environment of which a call still runs is not used again."""
        if self._rollouts is not None and self.model.training and self.environment_factories is not None:
            self._ahead.lend(self._progress()[2])
        with ExitStack() as self._resetting:
            if self._local is not None and self.environment_factories is not None:
                cause = (
                    f"an environment's reset has not returned within {self.args.rollout_timeout:g} s (rollout_timeout)"
                )
                limit = self._watch.limited("reset of environments", self.args.rollout_timeout, cause)
                self._resetting.enter_context(limit)
            try:
                return super()._generate_and_score_completions(inputs)
            finally:
                self._replace_hanging()

    def _generate(self, prompts: Any) -> Any:
        self._resetting.close()  # they are reset
        return super()._generate(prompts)

    def _replace_hanging(self) -> None:
        if self._rollouts is None or not self.environments or self._local is None:
            return
        _, tools = self._local.last_episodes
        for row in () if tools is None else tools.hanging_rows:
            pool = self._environment_pool[self._batch_environments[row]]
            pool[:] = [each for each in pool if each is not self.environments[row]]  # TRL makes others

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any) -> Any:
        """TRL's, of episodes that `_generate_single_turn` has had."""
        if self._local is None:
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest)
        episodes, tools = self._local.last_episodes
        assert tools is not None, "they were had"
        return as_trl_takes_them(episodes, completions, tools.counts)
