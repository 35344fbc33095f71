"""View of a trainer for its parts: TRL's attributes, private ones under stable names."""

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
    """Make a property that reads and sets an attribute of TRL's or transformers'."""

    def assign(view: "TrainerView", value: Any) -> None:
        setattr(view.trainer, name, value)

    return property(lambda view: getattr(view.trainer, name, *default), assign)


class TrainerView:
    """Interface of the trainer to its parts, once TRL has made it. It holds the trainer weakly."""

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
    """Environments to reuse, by their factory's name."""
    reward_funcs: list[Any] = trls("reward_funcs")
    reward_func_names: Sequence[str] = trls("reward_func_names")
    reward_weights: torch.Tensor = trls("reward_weights")
    has_aux_loss: bool = trls("aux_loss_enabled")
    engines: LocalVLLM = trls("vllm_generation")
    """This node's engines, in local mode; they take the place of TRL's generator."""
    async_loop: asyncio.AbstractEventLoop | None = trls("async_loop", None)
    """Event loop of asynchronous rewards and tools; None without any."""
    uses_vllm: bool = trls("use_vllm")
    synced_at: int = trls("_last_loaded_step")
    """Step of the newest weight sync; TRL skips a second one in the same step. -1 forces the next one."""
    micro_batches: int = trls("_step")
    """Number of micro-batches that training has begun, counted as often as each is trained on."""
    batch_in_use: list[Batch] | None = trls("_buffered_inputs")
    """Generation batch in training, as this rank's micro-batches."""
    pending_extra: MutableMapping[str, list[Any]] = trls("_pending_extra_logs")
    """Columns that reward functions add to the table of completions."""
    said: dict[str, Any] = trls("_logs")
    """Table of completions: the newest rows of all ranks by column, on every rank."""
    logs_images: bool = trls("log_multimodal")
    """True if TRL gathers images for the table of completions."""
    figures: Mapping[str, MutableMapping[str, list[float]]] = trls("_metrics")
    """Values of each metric since the last log, which gives their means; by "train" or "eval"."""

    def __init__(self, trainer: Any) -> None:
        self.trainer: Any = weakref.proxy(trainer)
        """Weak proxy of the trainer, also passed to the user's functions."""

    @property
    def mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def group_size(self) -> int:
        """Completions per prompt, in the present mode."""
        args = self.args
        return args.num_generations if self.mode == "train" else args.num_generations_eval or args.num_generations

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps done; 0 before there is a trainer."""
        return self.state.global_step if hasattr(self.trainer, "state") else 0

    @property
    def steps_per_batch(self) -> int:
        """Number of micro-batches that training takes per generation batch, repetitions included."""
        return self.args.steps_per_generation * self.args.num_iterations

    @property
    def batch_number(self) -> int:
        """Number of the generation batch in training; between two batches, of the next one."""
        return self.micro_batches // self.steps_per_batch

    @property
    def has_processor(self) -> bool:
        """True with a processor of text and images; otherwise there is only a tokenizer."""
        return isinstance(self.processing_class, ProcessorMixin)

    @property
    def tokenizer(self) -> Any:
        return self.processing_class.tokenizer if self.has_processor else self.processing_class

    @property
    def has_own_loss(self) -> bool:
        """True if a subclass computes the loss."""
        return self.trainer.__class__._compute_loss is not TRLTrainer._compute_loss

    def tokenize(self, prompts: list[Any]) -> list[list[int]]:
        """Tokenize a batch's prompts by TRL's method, or a subclass's."""
        return self.trainer._tokenize_prompts(prompts)[0]

    def tool_suffix(self, messages: list[Any]) -> list[int]:
        """Return the tokens after a turn with tool calls: the tools' answers, and the start of the next turn."""
        return self.trainer._get_tool_suffix_ids(messages)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor to the device as transformers does, with DeepSpeed's dtype."""
        return self.trainer._prepare_input(tensor)

    def save_checkpoint(self) -> None:
        """Save a checkpoint as at a step's end. Collective."""
        self.trainer._save_checkpoint(self.model_wrapped, None)

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add metrics of the present mode; TRL logs their means since the last log."""
        for name, value in metrics.items():
            self.figures[self.mode][name].append(value)

    def note_newest(self, name: str, value: float, mode: str = "train") -> None:
        """Set a metric of which only the newest value is logged."""
        self.figures[mode][name] = [value]
