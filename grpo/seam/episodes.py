"""Tools, environments and rollout functions with the node's own engines."""

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trl.chat_template_utils import parse_response

from grpo.model.messages import MessageTemplate
from grpo.place.log import EVERY_RANK, LOGS_FOLDER, log_name
from grpo.rollout.agents.rollout import AgentBatch, AgentRollout
from grpo.rollout.turns.environments import in_their_threads
from grpo.rollout.turns.episode import EpisodeLimits
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.rollouts import EpisodeRow, OnEnd, Rollouts, as_trl_takes_them
from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import Message, ToolRunner
from grpo.seam.episodes_ahead import EpisodesAhead, methods, toolbox
from grpo.seam.ordering import PromptOrder
from grpo.seam.run import JobRun
from grpo.seam.scoring import BatchRewards, use_device
from grpo.seam.view import TrainerView

_log = logging.getLogger(__name__)


def environments_in_threads(factories: Any, args: Any) -> Any:
    """Return `environment_factory` for TRL; its environments run in threads if `max_tool_threads` is set or they are
    marked for it."""
    prepare = partial(use_device, args.device)
    return in_their_threads(factories, of_all=args.max_tool_threads is not None, prepare=prepare)


def together(
    func: Callable[..., dict[str, Any]], view: TrainerView, note_sampling: Callable[[], None]
) -> Callable[..., dict[str, Any]]:
    """Wrap a rollout function for TRL: all ranks run it together, and a failure on one rank ends it on all.

    Args:
        note_sampling: called when a batch is sampled.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = view.engines.roll_out(lambda: func(prompts, trainer), prompts)
        note_sampling()
        return output

    return rollout


class Episodes:
    """A rank's episodes: any number of requests each to the node's engines.

    TRL keeps its `tools` and calls its tool loop, which returns the finished episodes: TRL chooses chat template,
    schema and metrics by its tools, and its path for a `rollout_func` has no images (1.16).

    Args:
        func: the user's rollout function, or None.
        tools: the user's tools.
    """

    def __init__(
        self,
        view: TrainerView,
        run: JobRun,
        order: PromptOrder,
        rewards: BatchRewards,
        *,
        func: Callable[..., dict[str, Any]] | None,
        tools: Sequence[Callable[..., Any]],
    ) -> None:
        self._view, self._run, self._rewards, self._func, self._tools = view, run, rewards, func, tools
        self._agent_template: MessageTemplate | None = None
        self._resetting = contextlib.ExitStack()
        self._ahead = EpisodesAhead(
            view, order, rewards, tools=tools, func=func, start=self._start, agent_batch=self.agent_batch
        )

    @functools.cached_property
    def rollouts(self) -> Rollouts | None:
        """Runner of episodes: of several turns, of a rollout function, or of single completions scored as they end.
        None if all completions of a rank arrive together. Available once TRL has made the trainer."""
        view, args, func = self._view, self._view.args, self._func
        comes_at_once = args.balances_nodes or not self._rewards.scoring.starts_early
        if comes_at_once and not view.tools and func is None:
            return None
        me: Any = weakref.proxy(self)  # the finalizer of a trainer that is never closed holds the rollouts
        prepare = partial(use_device, view.accelerator.device)
        return Rollouts(
            limits=self._limits,
            tools=ToolRunner(
                timeout_s=args.tool_timeout,
                main=MainThread(),
                max_threads=args.max_tool_threads,
                max_abandoned=args.max_abandoned_tools,
                say=self._say,
                prepare=prepare,
            ),
            is_function=func is not None,
            prepare=prepare,
            template=me,
            rows_of=lambda prompts: [me._row(row, ids) for row, ids in enumerate(prompts)],
            planned=lambda number: me._ahead.planned(number),
            on_end=lambda: me._on_end(),
            loop=view.async_loop,
            func=func if isinstance(func, AgentRollout) else None,
        )

    @property
    def _say(self) -> Callable[[str], None]:
        return partial(_log.warning, "rank %d: %s", self._view.accelerator.process_index, extra=EVERY_RANK)

    # -- messages and tokens, as in TRL (1.16) ------------------------------------------------------------------------

    def parse(self, token_ids: list[int], *, prefix: list[int], schema: Any) -> Message:
        """See `Template`."""
        tokenizer = self._view.tokenizer
        templates = [getattr(tokenizer, name, None) for name in ("response_template", "response_schema")]
        if not self._rewards.is_chat or templates == [None, None]:
            text = self._view.processing_class.decode(token_ids, skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        return parse_response(tokenizer, token_ids, prefix=prefix, tools=schema)

    def tool_suffix(self, messages: list[Message]) -> list[int]:
        """See `Template`."""
        return self._view.tool_suffix(messages)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _start(self, rows: Sequence[EpisodeRow], on_end: OnEnd | None, sampler: Sampler, tools: ToolRunner) -> Any:
        assert self.rollouts is not None, "they were planned"
        return self.rollouts.start(rows, on_end, sampler, tools)

    def _on_end(self) -> OnEnd | None:
        scoring = self._rewards.scoring
        return (
            partial(self._rewards.add, scoring)
            if scoring.starts_early and not self._view.args.generation_lookahead
            else None
        )

    def _row(self, row: int, token_ids: list[int]) -> EpisodeRow:
        """Return a row of the batch being sampled; its tools are found as in TRL (1.16)."""
        environments = self._view.environments
        tools = [*self._tools, *(methods(environments[row]) if environments else ())]
        return EpisodeRow.of(token_ids, toolbox(tools) if self._view.tools else None, tools)

    @property
    def _limits(self) -> EpisodeLimits:
        args = self._view.args
        turns = args.max_tool_calling_iterations
        return EpisodeLimits(
            max_completion_tokens=args.max_completion_length,
            max_turn_tokens=(args.generation_kwargs or {}).get("max_tokens") or args.max_completion_length,
            max_tool_turns=sys.maxsize if turns is None else turns,
        )

    def agent_batch(
        self, prompts: Sequence[Any], rows: Sequence[Any] | None = None, sampler: Sampler | None = None
    ) -> AgentBatch:
        """Return the batch being sampled, or another one, for `grpo.agents`.

        Args:
            prompts: this rank's prompts, one per row, as TRL passes them to the rollout function.
            rows: the other batch's rows of the data set; None for the batch being sampled.
            sampler: the other batch's sampler; None for the batch being sampled.

        Raises:
            TypeError: not in local mode, so there are no engines.
        """
        view, args, watch = self._view, self._view.args, self._run.watch
        if watch is None:
            raise TypeError("grpo.agents asks the node's own engines: set vllm_mode to 'local'")
        place, folder = self._run.groups.topology, Path(args.output_dir) / LOGS_FOLDER
        if self._agent_template is None:
            self._agent_template = MessageTemplate(view.processing_class, args.chat_template_kwargs or {})
        rows = self._rewards.inputs if rows is None else rows
        sampler = view.engines.sampler if sampler is None else sampler
        return AgentBatch(
            rows=rows if len(rows) == len(prompts) else [{"prompt": prompt} for prompt in prompts],
            is_chat=self._rewards.is_chat,
            sampler=sampler,
            template=self._agent_template,
            limits=self._limits.under(sampler.sampling),
            timeout_s=args.agent_timeout or args.rollout_timeout / 2,
            max_at_once=args.max_agents_at_once,
            max_failed=args.max_failed_agents,
            host=args.agent_host,
            log=folder / log_name("agents", node=place.node, index=place.rank, attempt=self._run.attempt),
            covers=watch.covers,
            uncovers=watch.uncovers,
            say=self._say,
            prepare=partial(use_device, view.accelerator.device),
            end_token=view.eos_token_ids[0],
        )

    @contextlib.contextmanager
    def of_batch(self) -> Iterator[None]:
        """Limit the time of `reset` while a batch is sampled. Environments with a call still running at the batch's end
        are replaced."""
        watch = self._run.watch
        if self._view.environment_factories is None or watch is None:
            yield
            return
        if self.rollouts is not None and self._view.mode == "train":
            self._ahead.lend(self._view.batch_number)
        seconds = self._view.args.rollout_timeout
        cause = f"an environment's reset has not returned within {seconds:g} s (rollout_timeout)"
        with contextlib.ExitStack() as self._resetting:
            self._resetting.enter_context(watch.limited("reset of environments", seconds, cause))
            try:
                yield
            finally:
                self._replace_hanging()

    def end_resets(self) -> None:
        """End the time limit: the batch's environments are reset."""
        self._resetting.close()

    def _replace_hanging(self) -> None:
        environments = self._view.environments
        _, tools = self._view.engines.last_episodes
        if self.rollouts is None or not environments or tools is None:
            return
        hanging = [environments[row] for row in tools.hanging_rows]
        for pool in self._view.environment_pool.values():
            pool[:] = [each for each in pool if not any(each is other for other in hanging)]  # TRL makes others

    def taken(self, completions: Any) -> Any:
        """Return the finished episodes in the form of TRL's tool loop."""
        episodes, tools = self._view.engines.last_episodes
        assert tools is not None, "they were had"
        return as_trl_takes_them(episodes, completions, tools.counts)
