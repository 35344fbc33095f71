"""Weights of four bits (QLoRA, https://arxiv.org/abs/2305.14314): bitsandbytes' layers, and what they compute with.

Such a layer holds two weights in a byte, and a scale for each block of them; its forward dequantises them first. The
engines get the matrix that comes of it, so both sides compute with the same numbers.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BLOCK = 64  # weights with one scale, whatever is asked for (`Params4bit`, bitsandbytes 0.50)
SCALES = 256  # scales with one scale of their own, in double quantisation
INSTALL = "pip install 'grpo-local[qlora]'"


def is_four_bit(tensor: Any) -> bool:
    """Whether a parameter holds quantised weights: uint8, of another shape than the layer's."""
    return getattr(tensor, "quant_state", None) is not None


def matrix_shape(tensor: Any) -> torch.Size:
    """[out, in] of the layer that a quantised parameter belongs to."""
    return torch.Size(tensor.quant_state.shape)


def dequantise(tensor: Any, place: torch.Tensor) -> None:
    """Write the matrix that the layer's forward multiplies with, in the dtype of `place`.

    Args:
        place: [out, in], on any device.
    """
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(tensor.quant_state)
    state.dtype = place.dtype  # that of the result: scales are in float32, and each product is rounded once
    place.copy_(dequantize_4bit(tensor.data, state))  # its `out` is for GPUs alone (0.50)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the layers of four bits compute in the engines' dtype, and their adapters be held in float32.

    On CPUs with AVX-512 for bfloat16 a layer would pack itself for its first forward without gradients, as a
    verification is one, into scales of 16 bits, and train no more afterwards (bitsandbytes 0.50). Adapters are held in
    float32 beside any other base, and DeepSpeed casts them to the dtype of training, with copies in float32; TRL makes
    them bfloat16 here (1.16), where a small step of Adam is rounded away.

    Does nothing to a model without such layers.
    """
    layers: list[Any] = [module for module in model.modules() if is_four_bit(module._parameters.get("weight"))]
    for layer in layers:
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        layer.support_avx512bf16_for_cpu = False
        layer.weight.quant_state.dtype = dtype  # in which its backward dequantises
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.to(dtype)  # as its first forward would, behind the first weight sync
    for parameter in model.parameters() if layers else ():
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitWeights:
    """Of a model, what would be held in four bits."""

    elements: int
    num_bytes: int
    """With scales: 0.5625 for each element, 0.516 with double quantisation."""
    largest: int
    """Elements of the largest matrix, which is dequantised whole."""


def four_bit_weights(model: Any, quantization: Any) -> FourBitWeights:
    """What transformers would quantise of `model`: linear layers, but for the head.

    Args:
        model: a transformers model, on the meta device.
        quantization: a `BitsAndBytesConfig` of four bits.
    """
    sizes = [layer.weight.numel() for layer in _quantised_layers(model, quantization)]
    return FourBitWeights(
        elements=sum(sizes),
        num_bytes=sum(_held_bytes(size, double=quantization.bnb_4bit_use_double_quant) for size in sizes),
        largest=max(sizes, default=0),
    )


def quantises_head(model: Any, quantization: Any) -> bool:
    """Whether transformers would quantise the head, too: it leaves it out unless it is given other modules to leave."""
    return any(layer is model.get_output_embeddings() for layer in _quantised_layers(model, quantization))


def _quantised_layers(model: Any, quantization: Any) -> list[nn.Linear]:
    """As `Bnb4BitHfQuantizer` chooses them (transformers 5.17)."""
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
