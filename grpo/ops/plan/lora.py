"""A model with LoRA adapters for a plan: wrapped by PEFT without its weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo.config import GRPOConfig
from grpo.model.four_bit import FourBitWeights, four_bit_weights
from grpo.ops.plan.model_shape import meta_model
from grpo.preflight.lora import LoraChoice, around_towers, check_head, choose_way, wrapped_without_weights

if TYPE_CHECKING:
    from grpo.weights.adapters import Lora  # needs PEFT

MERGE_BYTES = 16  # per element: weight, change, scaled change and their sum, in float32 (`LayerAdapter.merged`)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLora:
    """A model with adapters, without its weights."""

    choice: LoraChoice
    wrapped: Any
    """PEFT's model."""
    four_bits: FourBitWeights | None = None
    """4-bit weights of the base; None if it is not quantised."""

    @property
    def adapters(self) -> "Lora":
        """Adapters as the weight sync sees them."""
        from grpo.weights.adapters import Lora

        return Lora(self.wrapped, merges=self.choice.way == "merge")

    @property
    def engine_elements(self) -> int:
        """Elements of an engine's LoRA slots and of the adapters as received, which vLLM keeps beside them (0.31); 0
        with merged adapters.

        Counted in full for each GPU of an engine: tensor parallelism splits one of a layer's two matrices; which one
        depends on the layer.
        """
        if self.choice.way == "merge":
            return 0
        slot = self.choice.slot
        slot_rank = slot.engine_args["max_lora_rank"]
        return slot.number * sum((wide + tall) * (rank + slot_rank) for wide, tall, rank in self._sizes())

    @property
    def merge_bytes(self) -> int:
        """Temporary memory to merge the largest adapter into its weight; 0 if adapters are not merged."""
        if self.choice.way == "adapter":
            return 0
        return MERGE_BYTES * max(wide * tall for wide, tall, _ in self._sizes())

    def _sizes(self) -> list[tuple[int, int, int]]:
        """(in, out, rank) of each adapted layer."""
        matrices = [[part for part in layer.parts.values() if part.dim() == 2] for layer in self.adapters.layers()]
        return [(down.shape[1], up.shape[0], down.shape[0]) for down, up in matrices]


def planned_lora(
    peft_config: Any,
    args: GRPOConfig,
    config: Any,
    dtype: torch.dtype,
    *,
    has_gpus: bool,
    quantization: Any = None,
) -> PlannedLora:
    """Wrap the model of `config` with `peft_config`, which `check_lora` has accepted.

    Args:
        dtype: the engine's.
        quantization: of the base; None without.

    Raises:
        ValueError: as `choose_way`.
    """
    peft_config = around_towers(peft_config, config._name_or_path, args)
    plain = meta_model(config, trust_remote_code=args.trust_remote_code)
    check_head(plain, quantization)
    four_bits = None if quantization is None else four_bit_weights(plain, quantization)
    wrapped = wrapped_without_weights(plain, peft_config)
    choice = choose_way(wrapped, peft_config, args, dtype, has_gpus=has_gpus, four_bits=four_bits is not None)
    return PlannedLora(choice=choice, wrapped=wrapped, four_bits=four_bits)
