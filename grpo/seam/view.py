"""A trainer as its parts see it: TRL's private attributes, under names that stay."""

import asyncio
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from transformers import ProcessorMixin, TrainerControl, TrainerState

from grpo.seam.engines import LocalEngines

Batch = dict[str, Any]


class TrainerView:
    """All that parts may know of their trainer, which no part keeps alive; once TRL has made it.

    Declared here are public attributes of TRL's and of transformers'. Properties stand for private ones, and for what
    others may set.
    """

    args: Any
    """A `GRPOConfig`."""
    state: TrainerState
    control: TrainerControl
    accelerator: Accelerator
    model: Any
    model_wrapped: Any
    ref_model: Any
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    is_deepspeed_enabled: bool
    environments: Sequence[Any] | None
    environment_factories: Mapping[Any, Any] | None
    tools: Sequence[Any]
    chat_template: Any
    rollout_func: Any
    reward_func_names: Sequence[str]
    reward_weights: torch.Tensor
    eos_token_ids: Sequence[int]

    def __init__(self, trainer: Any) -> None:
        self._trainer: Any = weakref.proxy(trainer)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in TrainerView.__annotations__:
                raise AttributeError(f"parts of a trainer do not see its {name}")
            return getattr(self._trainer, name)

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def engines(self) -> LocalEngines:
        """In local mode, which has them where TRL has its generator."""
        return self._trainer.vllm_generation

    # -- where training is ------------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """That training has begun, each as often as it is trained on."""
        return self._trainer._step

    @property
    def steps_per_batch(self) -> int:
        """Micro-batches that a generation batch is trained on."""
        return self.args.steps_per_generation * self.args.num_iterations

    @property
    def batch_number(self) -> int:
        """Of the generation batch that is trained on, or comes next."""
        return self.micro_batches // self.steps_per_batch

    # -- a batch ----------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        """As functions of the user's are given it."""
        return self._trainer

    @property
    def group_size(self) -> int:
        """Completions of a prompt, in the present mode."""
        args = self.args
        return args.num_generations if self.mode == "train" else args.num_generations_eval or args.num_generations

    @property
    def reward_funcs(self) -> list[Any]:
        return self._trainer.reward_funcs

    @reward_funcs.setter
    def reward_funcs(self, functions: list[Any]) -> None:
        self._trainer.reward_funcs = functions

    @property
    def async_loop(self) -> asyncio.AbstractEventLoop | None:
        """Of asynchronous rewards and tools, where there are any."""
        return getattr(self._trainer, "async_loop", None)

    @property
    def environment_pool(self) -> dict[Any, list[Any]]:
        """By their factory's name those that are reused."""
        return self._trainer._environment_pool

    @property
    def pending_extra(self) -> MutableMapping[str, list[Any]]:
        """Columns that reward functions add to the table of completions."""
        return self._trainer._pending_extra_logs

    @property
    def tokenizer(self) -> Any:
        processing = self.processing_class
        return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing

    def tokenize(self, prompts: list[Any]) -> list[list[int]]:
        """Of a batch's prompts, in TRL's way; or in a subclass's."""
        return self._trainer._tokenize_prompts(prompts)[0]

    def tool_suffix(self, messages: list[Any]) -> list[int]:
        """What stands behind a completion in which tools were called: their answers, and the next turn's beginning."""
        return self._trainer._get_tool_suffix_ids(messages)

    # -- figures ----------------------------------------------------------------------------------------------------

    @property
    def noted(self) -> MutableMapping[str, list[float]]:
        """Figures of the present mode since the last log, which has their means."""
        return self._trainer._metrics[self.mode]

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.noted[name].append(value)
