"""The trained model that engines are kept equal to, and factories for its weight source and verification."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from grpo.config import GRPOConfig
from grpo.config.models import EngineModel
from grpo.engine.like import EngineLike
from grpo.model.picture_probe import PictureProbe
from grpo.model.text_part import placeholder_ids
from grpo.weights.adapter_trial import AdapterTrial
from grpo.weights.adapters import Lora
from grpo.weights.layers import has_experts
from grpo.weights.probe import probe_prompts
from grpo.weights.source import GatheredSource
from grpo.weights.verifier import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The trainer's model, as seen by the engines' side of the trainer."""

    model: nn.Module
    """Unwrapped transformers model; the base of a PEFT model."""
    engine_model: EngineModel
    """Description for the engines."""
    end_tokens: tuple[int, ...]
    """End tokens of a completion in the trainer's view. The first stands for one in rows refused by all engines."""
    special_ids: tuple[int, ...] = ()
    """Tokens excluded from the random half of the probe, in addition to image placeholders."""
    text: tuple[int, ...] = ()
    """Token ids of ordinary text, the same on every rank."""
    reference: nn.Module | None = None
    """Unwrapped reference model, if TRL has a separate one."""
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    """Makes the context for the trainer's forwards."""
    lora: Lora | None = None
    """Adapters of the model."""
    pictures: PictureProbe | None = None
    """Probe with images, if prompts have some; the same on every rank."""

    @property
    def vocab_size(self) -> int:
        embedding = self.model.get_input_embeddings()
        return getattr(embedding, "base_layer", embedding).num_embeddings  # below PEFT's layer, if there is one

    @property
    def sampled_ends(self) -> tuple[int, ...]:
        """End tokens that the model can sample: vLLM refuses a request with others (0.31)."""
        return tuple(token for token in self.end_tokens if 0 <= token < self.vocab_size)

    def source(self, args: GRPOConfig) -> GatheredSource:
        return GatheredSource(
            self.model,
            wire_dtype=self.engine_model.dtype,
            bucket_bytes=args.vllm_sync_bucket_mb * 2**20,
            lora=self.lora,
            takes_images=self.pictures is not None,
        )

    def verifier(
        self,
        args: GRPOConfig,
        clients: Sequence[EngineLike],
        max_model_len: int,
        *,
        num_shards: int,
        on_gpus: bool,
        largest: Callable[[float], float],
    ) -> Verifier:
        """Make the verifier of weight syncs to `clients`.

        Args:
            num_shards: vocabulary shards of an engine.
            largest: as in `Verifier`.
        """
        return Verifier(
            model=self.model,
            clients=clients,
            probe=probe_prompts(
                self.vocab_size,
                max_model_len,
                {*self.special_ids, *placeholder_ids(self.model.config)},
                text=self.text,
                num_shards=num_shards,
            ),
            dtype=self.engine_model.dtype,
            asked_limit=args.vllm_max_logprob_gap,
            autocast=self.autocast,
            cast_lm_head_to_fp32=args.cast_lm_head_to_fp32,
            timeout_s=args.vllm_sync_timeout,
            largest=largest,
            on_gpus=on_gpus,
            has_routers=has_experts(self.model),
            reference=self.reference,
            pictures=self.pictures,
        )

    @property
    def adapters_travel(self) -> bool:
        """True if adapters are sent alone, not merged into weights."""
        return self.lora is not None and not self.lora.merges

    def trial(self, verifier: Verifier, smallest: Callable[[float], float]) -> AdapterTrial | None:
        """Make the trial of adapters, if they are sent alone; see `AdapterTrial`."""
        if self.lora is None or self.lora.merges:
            return None
        return AdapterTrial(self.lora, verifier, smallest)
