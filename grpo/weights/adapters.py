"""A PEFT model: its base as if unwrapped, and its adapters, which a weight sync sends or merges.

LoRA: https://arxiv.org/abs/2106.09685, W x + s B A x, with A [r, in], B [out, r] and the scale s. DoRA:
https://arxiv.org/abs/2402.09353.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from grpo.weights.gather import gathered
from grpo.weights.layers import layers_replaced
from grpo.weights.names import ADAPTER_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapter:
    """Adapter of one layer."""

    weight: str
    """Name of the adapted weight, in the base."""
    parts: Mapping[str, torch.Tensor]
    """Parameters by PEFT's names: `lora_A.weight` and `lora_B.weight`, and others if present."""
    scale: float

    @property
    def path(self) -> str:
        return self.weight.rpartition(".")[0]

    def name_of(self, part: str) -> str:
        """Name of a part in PEFT's files, as vLLM reads it."""
        return f"{ADAPTER_PREFIX}{self.path}.{part}"

    def merged(self, weight: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the layer's weight merged with its adapter, in the dtype of `weight`; computed in float32.

        Args:
            weight: [out, in] of a linear layer, [entries, width] of an embedding.
            parts: those of `self`, gathered.
        """
        if "lora_embedding_A" in parts:
            change = (parts["lora_embedding_B"].float() @ parts["lora_embedding_A"].float()).T
        else:
            change = parts["lora_B.weight"].float() @ parts["lora_A.weight"].float()
        whole = weight.float() + self.scale * change
        if (magnitude := parts.get("lora_magnitude_vector.weight")) is not None:  # DoRA
            by_rows = "lora_embedding_A" not in parts  # for an embedding PEFT takes the norms of columns (0.21)
            scale = magnitude.float() / torch.linalg.norm(whole, dim=1 if by_rows else 0)
            whole *= scale[:, None] if by_rows else scale[None, :]
        return whole.to(weight.dtype)


class Lora:
    """Adapters of a PEFT model, separate from its base.

    Args:
        merges: send adapters merged into the weights they change, instead of alone.
    """

    def __init__(self, model: PeftModel, *, merges: bool) -> None:
        self.base: nn.Module = model.get_base_model()
        self.merges = merges
        self.adapter_name: str = model.active_adapters[0]

    def layers(self) -> list[LayerAdapter]:
        """List the layers with an adapter, in the order of the base's modules."""
        return [
            LayerAdapter(
                weight=f"{path}.weight", parts=dict(self._parts(module)), scale=module.scaling[self.adapter_name]
            )
            for path, module in self.base.named_modules()
            if isinstance(module, LoraLayer) and self.adapter_name in module.scaling
        ]

    def _parts(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this adapter's parts of a layer, by the names in PEFT's files."""
        for kind in module.adapter_layer_names:
            if self.adapter_name not in (held := getattr(module, kind)):
                continue
            part = held[self.adapter_name]
            if isinstance(part, torch.Tensor):
                yield kind, part
                continue
            for leaf, tensor in part.named_parameters():
                yield f"{kind}.{leaf}", tensor

    def unwrapped(self) -> contextlib.AbstractContextManager[None]:
        """Remove PEFT's layers from the base in a `with` block; no forward may run meanwhile."""
        return layers_replaced(self.base, self._inner)

    def _inner(self, module: nn.Module) -> nn.Module | None:
        if isinstance(module, ModulesToSaveWrapper):
            return module.modules_to_save[self.adapter_name]
        return module.get_base_layer() if isinstance(module, BaseTunerLayer) else None

    @contextlib.contextmanager
    def with_noise(self, deviation: float) -> Iterator[None]:
        """Add noise to every B in a `with` block, the same on every rank. Collective under ZeRO-3.

        Args:
            deviation: standard deviation of the noise.
        """
        parts = [part for layer in self.layers() for name, part in layer.parts.items() if "_B" in name]
        with gathered(parts, modifier_rank=0):
            kept = [part.detach().clone() for part in parts]
            generator = torch.Generator().manual_seed(0)
            for part in parts:
                part.data += (torch.randn(part.shape, generator=generator) * deviation).to(part)
        try:
            yield
        finally:
            with gathered(parts, modifier_rank=0):
                for part, before in zip(parts, kept, strict=True):
                    part.data.copy_(before)
