"""4-bit weights (QLoRA, https://arxiv.org/abs/2305.14314): bitsandbytes' layers, and their compute dtype.

Such a layer holds two weights in a byte, and one scale per block of weights; its forward dequantises them first.
Engines get the dequantised matrix, so both sides compute with the same numbers.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BLOCK = 64  # weights per scale, regardless of the requested size (`Params4bit`, bitsandbytes 0.50)
SCALES = 256  # scales per second-level scale, with double quantisation
INSTALL = "pip install 'grpo-local[qlora]'"


def is_four_bit(tensor: Any) -> bool:
    """True if a parameter holds quantised weights: uint8, in another shape than the layer's."""
    return getattr(tensor, "quant_state", None) is not None


def matrix_shape(tensor: Any) -> torch.Size:
    """Return the shape [out, in] of the layer a quantised parameter belongs to."""
    return torch.Size(tensor.quant_state.shape)


def dequantise(tensor: Any, place: torch.Tensor) -> None:
    """Write the dequantised matrix, as the layer's forward uses it, in the dtype of `place`.

    Args:
        place: output, [out, in], on any device.
    """
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(tensor.quant_state)
    state.dtype = place.dtype  # dtype of the result: scales are in float32, and each product is rounded once
    place.copy_(dequantize_4bit(tensor.data, state))  # its `out` is for GPUs only (0.50)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make 4-bit layers compute in the engines' dtype, and hold their adapters in float32.

    On CPUs with AVX-512 for bfloat16, the first forward without gradients (a verification is one) would repack a layer
    with 16-bit scales, and the layer could no longer train (bitsandbytes 0.50). With any other base, adapters are held
    in float32; DeepSpeed casts them to the training dtype and keeps float32 copies. For 4-bit bases TRL makes them
    bfloat16 (1.16), which rounds away small Adam steps.

    Does nothing to a model without such layers.
    """
    layers: list[Any] = [module for module in model.modules() if is_four_bit(module._parameters.get("weight"))]
    for layer in layers:
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        layer.support_avx512bf16_for_cpu = False
        layer.weight.quant_state.dtype = dtype  # its backward dequantises to this dtype
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.to(dtype)  # as its first forward would, after the first weight sync
    for parameter in model.parameters() if layers else ():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitWeights:
    """Sizes of the part of a model that would be held in 4 bits."""

    elements: int
    num_bytes: int
    """Bytes including scales: 0.5625 per element, 0.516 with double quantisation."""
    largest: int
    """Elements of the largest matrix, which is dequantised whole."""


def four_bit_weights(model: Any, quantization: Any) -> FourBitWeights:
    """Measure the part of `model` that transformers would quantise: linear layers except the head.

    Args:
        model: a transformers model, on the meta device.
        quantization: a `BitsAndBytesConfig` for 4 bits.
    """
    sizes = [layer.weight.numel() for layer in _quantised_layers(model, quantization)]
    return FourBitWeights(
        elements=sum(sizes),
        num_bytes=sum(_held_bytes(size, double=quantization.bnb_4bit_use_double_quant) for size in sizes),
        largest=max(sizes, default=0),
    )


def quantises_head(model: Any, quantization: Any) -> bool:
    """True if transformers would quantise the head too; by default it skips the head, unless given other modules to
    skip."""
    return any(layer is model.get_output_embeddings() for layer in _quantised_layers(model, quantization))


def _quantised_layers(model: Any, quantization: Any) -> list[nn.Linear]:
    """Linear layers chosen as `Bnb4BitHfQuantizer` does (transformers 5.17)."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    left_out = HfQuantizer.get_modules_to_not_convert(
        model, quantization.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    modules = model.named_modules()
    return [each for path, each in modules if type(each) is nn.Linear and should_convert_module(path, left_out)]


def _held_bytes(elements: int, *, double: bool) -> int:
    blocks = -(-elements // BLOCK)
    scales = blocks + 4 * -(-blocks // SCALES) if double else 4 * blocks
    return -(-elements // 2) + scales
