"""A trainer as its parts see it: TRL's attributes, private ones under names that stay."""

import asyncio
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import ProcessorMixin, TrainerControl, TrainerState

from grpo.local_vllm import LocalVLLM
from grpo.seam.lazy_vllm import TRLTrainer

Batch = dict[str, Any]


def trls(name: str, *default: Any) -> Any:
    """TRL's or transformers' attribute of this name, to be read and to be set."""

    def assign(view: "TrainerView", value: Any) -> None:
        setattr(view.trainer, name, value)

    return property(lambda view: getattr(view.trainer, name, *default), assign)


class TrainerView:
    """All that parts may know of their trainer, once TRL has made it; none of them keeps it alive."""

    args: Any = trls("args")
    """A `GRPOConfig`."""
    state: TrainerState = trls("state")
    control: TrainerControl = trls("control")
    accelerator: Accelerator = trls("accelerator")
    callback_handler: Any = trls("callback_handler")
    optimizer: Any = trls("optimizer")
    is_deepspeed_enabled: bool = trls("is_deepspeed_enabled")
    model: Any = trls("model")
    model_wrapped: Any = trls("model_wrapped")
    ref_model: Any = trls("ref_model")
    processing_class: Any = trls("processing_class")
    chat_template: Any = trls("chat_template")
    eos_token_ids: Sequence[int] = trls("eos_token_ids")
    train_dataset: Any = trls("train_dataset")
    eval_dataset: Any = trls("eval_dataset")
    tools: Sequence[Any] = trls("tools")
    rollout_func: Any = trls("rollout_func")
    environments: Sequence[Any] | None = trls("environments")
    environment_factories: Any = trls("environment_factories")
    environment_pool: dict[Any, list[Any]] = trls("_environment_pool")
    """By their factory's name those that are reused."""
    reward_funcs: list[Any] = trls("reward_funcs")
    reward_func_names: Sequence[str] = trls("reward_func_names")
    reward_weights: torch.Tensor = trls("reward_weights")
    has_aux_loss: bool = trls("aux_loss_enabled")
    engines: LocalVLLM = trls("vllm_generation")
    """In local mode, which has them where TRL has its generator."""
    async_loop: asyncio.AbstractEventLoop | None = trls("async_loop", None)
    """Of asynchronous rewards and tools, where there are any."""
    uses_vllm: bool = trls("use_vllm")
    synced_at: int = trls("_last_loaded_step")
    """The step of the newest weight sync, by which TRL leaves out the next one; -1 lets it have one."""
    micro_batches: int = trls("_step")
    """That training has begun, each as often as it is trained on."""
    batch_in_use: list[Batch] | None = trls("_buffered_inputs")
    """The generation batch that is trained on, in this rank's micro-batches."""
    pending_extra: MutableMapping[str, list[Any]] = trls("_pending_extra_logs")
    """Columns that reward functions add to the table of completions."""
    said: dict[str, Any] = trls("_logs")
    """That table: by column the newest rows of all ranks, on every rank."""
    logs_images: bool = trls("log_multimodal")
    """Whether TRL gathers images for it."""
    figures: Mapping[str, MutableMapping[str, list[float]]] = trls("_metrics")
    """By "train" or "eval" those since the last log, which has their means."""

    def __init__(self, trainer: Any) -> None:
        self.trainer: Any = weakref.proxy(trainer)
        """As functions of the user's are given it."""

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def group_size(self) -> int:
        """Completions of a prompt, in the present mode."""
        args = self.args
        return args.num_generations if self.mode == "train" else args.num_generations_eval or args.num_generations

    @property
    def steps_done(self) -> int:
        """Optimizer steps; 0 before there is a trainer."""
        return self.state.global_step if hasattr(self.trainer, "state") else 0

    @property
    def steps_per_batch(self) -> int:
        """Micro-batches that a generation batch is trained on."""
        return self.args.steps_per_generation * self.args.num_iterations

    @property
    def batch_number(self) -> int:
        """Of the generation batch that is trained on, or comes next."""
        return self.micro_batches // self.steps_per_batch

    @property
    def has_processor(self) -> bool:
        """Of prompts with images; else there is a tokenizer alone."""
        return isinstance(self.processing_class, ProcessorMixin)

    @property
    def tokenizer(self) -> Any:
        return self.processing_class.tokenizer if self.has_processor else self.processing_class

    @property
    def has_own_loss(self) -> bool:
        """Whether a subclass computes it."""
        return self.trainer.__class__._compute_loss is not TRLTrainer._compute_loss

    def tokenize(self, prompts: list[Any]) -> list[list[int]]:
        """Of a batch's prompts, in TRL's way; or in a subclass's."""
        return self.trainer._tokenize_prompts(prompts)[0]

    def tool_suffix(self, messages: list[Any]) -> list[int]:
        """What stands behind a completion in which tools were called: their answers, and the next turn's beginning."""
        return self.trainer._get_tool_suffix_ids(messages)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the way of transformers, by which DeepSpeed has its dtype."""
        return self.trainer._prepare_input(tensor)

    def save_checkpoint(self) -> None:
        """As at a step's end. Collective."""
        self.trainer._save_checkpoint(self.model_wrapped, None)

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Figures of the present mode, of which TRL logs the mean since the last log."""
        for name, value in metrics.items():
            self.figures[self.mode][name].append(value)

    def note_newest(self, name: str, value: float, mode: str = "train") -> None:
        """A figure of which the newest value alone is logged."""
        self.figures[mode][name] = [value]
