"""Shape of a model from its configuration only: parameters are counted on a meta model.

Parameters are counted by identity: a tied embedding counts once, fused experts count in full. Accelerate's estimator
refuses local paths, and DeepSpeed's miscounts a meta model.
"""

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from grpo.config.models import base_of
from grpo.model.four_bit import FourBitWeights
from grpo.model.text_part import freeze_towers, model_without_weights, tower_paths, tower_tensors
from grpo.weights.layers import has_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Sizes of a set of parameters, each counted once."""

    elements: int
    sizes: tuple[tuple[int, int], ...]
    """(elements, number of parameters of this size), ascending."""

    @property
    def largest(self) -> int:
        return self.sizes[-1][0] if self.sizes else 0

    def sharded(self, world_size: int) -> int:
        """Elements per rank under ZeRO-3: each parameter is split into equal parts, the last one padded."""
        return sum(-(-size // world_size) * count for size, count in self.sizes)

    def up_to(self, threshold: int) -> int:
        """Elements in all parameters of at most `threshold` elements."""
        return sum(size * count for size, count in self.sizes if size <= threshold)


def tensors_of(parameters: Iterable[torch.Tensor]) -> Tensors:
    sizes = Counter(parameter.numel() for parameter in parameters)
    return Tensors(elements=sum(size * count for size, count in sizes.items()), sizes=tuple(sorted(sizes.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One kind of decoder layer. Sizes are elements, not bytes."""

    count: int
    """Number of layers of this kind."""
    parameters: int
    norm_elements: int
    """Inputs of the norms per token, with those of queries and keys."""
    mlp_elements: int
    """Activations per token saved for backward by the MLP, or by the experts on the token's route."""
    adapter_ranks: int | None = None
    """Activations per token saved by LoRA adapters, the sum of their ranks; None if the layer itself is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model."""

    name: str
    num_parameters: int
    """Each tensor once; without adapters."""
    trained: Tensors
    """All parameters; with LoRA the trained ones of adapters and base."""
    frozen: Tensors
    """The rest; with LoRA the base."""
    trains_head: bool
    largest_layer: int
    """Parameters of the largest part gathered at once: a decoder layer, the embedding or the head."""
    layers: tuple[LayerShape, ...]
    hidden_size: int
    vocab_size: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    """Head size of queries, keys, values and the attention output; their mean if they differ (latent attention)."""
    latent_kv_elements: int | None
    """Multi-head latent attention: elements per token and layer instead of keys and values; None without it."""
    kv_windows: tuple[tuple[int | None, int], ...]
    """(window in tokens, layers); None: the whole sequence."""
    layers_without_kv: int
    """Layers with a state of fixed size (linear attention); the state is not counted."""
    expert_parameters: int = 0
    """Parameters of routed experts; shared experts are not included."""
    routed_share: float = 1.0
    """Share of the experts on a token's route: 8 of 128 are 1/16."""
    towers: tuple[str, ...] = ()
    """Paths of modules that take no part in text."""
    tower_parameters: int = 0
    """Part of `num_parameters` in towers beside the text part: for text only, frozen and absent from the engines."""
    takes_images: bool = False
    four_bits: FourBitWeights | None = None
    """Part of `frozen` held in four bits on the ranks."""

    @property
    def num_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def elements(self) -> int:
        """Elements of all parameters, adapters included."""
        return self.trained.elements + self.frozen.elements

    @property
    def text_parameters(self) -> int:
        """Parameters on the path of a text token."""
        return self.num_parameters - self.tower_parameters

    @property
    def engine_parameters(self) -> int:
        """Parameters held by an engine."""
        return self.num_parameters if self.takes_images else self.text_parameters

    def parameters_read(self, tokens: float) -> float:
        """Return the mean number of parameters on the path of `tokens` tokens together, if all experts are equally
        likely."""
        return self.text_parameters - self.expert_parameters * (1 - self.routed_share) ** tokens


def shape_of(
    config: Any,
    name: str,
    *,
    wrapped: Any = None,
    four_bits: FourBitWeights | None = None,
    takes_images: bool = False,
    trains_towers: bool = False,
    trust_remote_code: bool = False,
) -> ModelShape:
    """Compute the shape of the causal language model of `config`, in a fraction of a second and without its memory.

    Args:
        wrapped: the same model wrapped by PEFT, on the meta device too; None without adapters.
        four_bits: its 4-bit weights; None: nothing is quantised.
        takes_images: True if its prompts come with images.

    Raises:
        ValueError: the configuration is not of a causal language model with attention.
    """
    text = config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        raise ValueError(f"{name} is a {config.model_type} without attention heads: its memory cannot be estimated")

    model = meta_model(config, trains_towers=trains_towers, trust_remote_code=trust_remote_code)
    held = model if wrapped is None else wrapped
    parameters = list(held.parameters())  # a tied one comes once
    decoder = decoder_layers(model)
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = _head_dim(text, heads)
    in_layers = {id(module) for layer in decoder for module in layer.modules()}
    outside = [
        sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for module in model.modules()
        if id(module) not in in_layers
    ]
    ranks = [None] * len(decoder) if wrapped is None else list(map(_adapter_ranks, decoder_layers(wrapped)))
    layers = Counter(
        replace(_layer_shape(layer, text, heads * head_dim, key_value_heads * head_dim), adapter_ranks=of_adapters)
        for layer, of_adapters in zip(decoder, ranks, strict=True)
    )
    windows, without_kv = _kv_windows(text, len(decoder))
    latent = getattr(text, "kv_lora_rank", None)
    experts = _expert_parameters(decoder)
    of_towers = tower_tensors(model)
    return ModelShape(
        name=name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=tensors_of(parameter for parameter in parameters if parameter.requires_grad),
        frozen=tensors_of(parameter for parameter in parameters if not parameter.requires_grad),
        trains_head=any(parameter.requires_grad for parameter in held.get_output_embeddings().parameters()),
        largest_layer=max([*outside, *(layer.parameters for layer in layers)]),
        layers=tuple(replace(layer, count=count) for layer, count in layers.items()),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        attention_heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        latent_kv_elements=None if latent is None else latent + getattr(text, "qk_rope_head_dim", 0),
        kv_windows=windows,
        layers_without_kv=without_kv,
        expert_parameters=experts,
        routed_share=_routed(text) / _num_experts(text) if experts else 1.0,
        four_bits=four_bits,
        towers=tower_paths(model),
        tower_parameters=sum(parameter.numel() for name, parameter in model.named_parameters() if name in of_towers),
        takes_images=takes_images,
    )


def _head_dim(text: Any, heads: int) -> int:
    if getattr(text, "kv_lora_rank", None):  # here `head_dim` is of the rotary part only (5.17)
        return (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) // 2
    return getattr(text, "head_dim", None) or text.hidden_size // heads


def meta_model(config: Any, *, trains_towers: bool = False, trust_remote_code: bool = False) -> nn.Module:
    """Build the model of `config` on the meta device. The text part is trained; towers only with `trains_towers`."""
    model = model_without_weights(config, trust_remote_code=trust_remote_code)
    if not trains_towers:
        freeze_towers(model)
    return model


def count_parameters(config: Any, *, trust_remote_code: bool = False) -> int:
    """Count the parameters of a reward model: a sequence classifier with one label and no language head."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    config.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def decoder_layers(model: Any) -> nn.ModuleList:
    """Find the list of decoder layers: the module list of the text part with the most parameters."""
    text: Any = base_of(model)
    lists = [module for module in text.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda modules: sum(parameter.numel() for parameter in modules.parameters()))


def _adapter_ranks(layer: nn.Module) -> int:
    from peft.tuners.lora import LoraLayer

    return sum(sum(module.r.values()) for module in layer.modules() if isinstance(module, LoraLayer))


def _layer_shape(layer: nn.Module, text: Any, query_size: int, key_size: int) -> LayerShape:
    norms = 0
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and weight is not None:
            of_heads = {"q_norm": query_size, "k_norm": key_size}.get(name.rpartition(".")[2], 0)
            norms += max(weight.numel(), of_heads)  # one norm may be applied to every head
    is_sparse = has_experts(layer)
    # transformers' routers with a correction bias, and no others, save their input in float32: 2 elements (5.17).
    in_float32 = any(name.endswith("e_score_correction_bias") for name, _ in layer.named_buffers())
    return LayerShape(
        count=1,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        norm_elements=norms,
        mlp_elements=_mlp_elements(text, is_sparse=is_sparse) + (2 * text.hidden_size if in_float32 else 0),
    )


def _mlp_elements(text: Any, *, is_sparse: bool) -> int:
    """Elements per token saved by a gated MLP of width f: gate, its activation, the other half and their product, 4 f.

    Routed experts do so for each token they receive; they also save its input and output, for the gather before them
    and the weighting after them.
    """
    if not is_sparse:
        return 4 * _mlp_width(text)
    width = getattr(text, "moe_intermediate_size", None) or _mlp_width(text)
    shared = getattr(text, "shared_expert_intermediate_size", None) or width * (
        getattr(text, "n_shared_experts", None) or 0
    )
    return _routed(text) * (4 * width + 2 * text.hidden_size) + 4 * shared


def _routed(text: Any) -> int:
    """Number of experts per token."""
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1


def _num_experts(text: Any) -> int:
    """Experts of a layer, by any of their names in transformers' configurations (5.17)."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(text, name, None))), _routed(text))


def _expert_parameters(decoder: nn.ModuleList) -> int:
    """Parameters of all routed experts, each counted once."""
    held = {
        id(parameter): parameter.numel()
        for name, module in decoder.named_modules()
        if name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__
        for parameter in module.parameters()
    }
    return sum(held.values())


def _mlp_width(text: Any) -> int:
    """Width of the widest MLP, by any of its names in transformers' configurations (5.17)."""
    names = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
    found = next((width for name in names if (width := getattr(text, name, None))), 4 * text.hidden_size)
    return max(found) if isinstance(found, list | tuple) else found


def _kv_windows(text: Any, num_layers: int) -> tuple[tuple[tuple[int | None, int], ...], int]:
    """(window in tokens, layers) of the layers with keys and values, and the number of layers without."""
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        slides = window is not None and getattr(text, "use_sliding_window", True)
        types = ["sliding_attention" if slides else "full_attention"] * num_layers
    chunk = getattr(text, "attention_chunk_size", None)
    remembered = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    windows = Counter(remembered[kind] for kind in types if kind in remembered)
    return tuple(windows.items()), sum(kind not in remembered for kind in types)
