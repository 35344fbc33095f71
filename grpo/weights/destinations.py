"""Destinations of checkpoint tensors in the engine, found by running vLLM's own `load_weights`.

Names are not enough: vLLM fuses projections and renames, and every model has its own mapping. This module replaces all
weight loaders, either for a dry run without loading, or to observe real loads.

Runs in vLLM's worker processes; imports neither TRL nor DeepSpeed.
"""

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.attention.attention import should_load_quant_weights
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import is_quantized_kv_cache

Loader = Callable[..., Any]

# Scales of an attention layer's KV cache. Unless the model is quantised, vLLM sets the first four to 1 itself at the
# end of every reload (`set_default_quant_scales` in attention.py:601, mla_attention.py:1341, vLLM 0.31); the others
# exist only between loading and processing, and are unused without a quantised cache.
KV_CACHE_SCALES = frozenset(
    ["_k_scale", "_v_scale", "_q_scale", "_prob_scale", "k_scale", "v_scale", "q_scale", "prob_scale"]
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Destination:
    """A tensor of the engine that a checkpoint may fill."""

    path: str
    layer: torch.nn.Module
    name: str
    """Name in its layer."""
    tensor: torch.Tensor


def destinations(model: torch.nn.Module) -> list[Destination]:
    """List parameters and persistent buffers, each once, by their first path; also those filled by
    `load_format="dummy"`.

    Includes tensors that vLLM excludes from a layer's element count (`SKIP_LOAD_TENSORS` in
    model_loader/reload/meta.py, vLLM 0.31), such as a router's `e_score_correction_bias`: a reload leaves it in place,
    and its loader writes to it directly.
    """
    found: dict[int, Destination] = {}
    for layer_path, layer in model.named_modules():
        for name, tensor in get_layer_tensors(layer).items():
            if name not in layer._non_persistent_buffers_set:
                path = f"{layer_path}.{name}" if layer_path else name
                found.setdefault(id(tensor), Destination(path=path, layer=layer, name=name, tensor=tensor))
    return list(found.values())


def is_set_by_vllm(destination: Destination, *, tied: bool) -> bool:
    """True if vLLM sets this tensor itself, so that no weight sync needs to.

    Args:
        tied: the model's configuration ties the head to the embedding.
    """
    layer = destination.layer
    if not destination.tensor.is_floating_point():
        return True  # expert maps and the like, set in constructors; dummy loading does not change them
    if is_deferred_attention_layer(layer) and destination.name in KV_CACHE_SCALES:
        return not should_load_quant_weights(getattr(layer, "quant_method", None)) or not is_quantized_kv_cache(
            getattr(layer, "kv_cache_dtype", "auto")
        )
    return tied and isinstance(layer, ParallelLMHead)  # its tensor is the embedding's


@contextlib.contextmanager
def loaders_replaced(model: torch.nn.Module, replace: Callable[[Destination, Loader], Loader]) -> Iterator[None]:
    """Replace the weight loaders of a model prepared for a reload, in a `with` block.

    Args:
        replace: makes a new loader from a tensor's present one. A loader with the original's name (`functools.wraps`)
            counts as the original: vLLM unwraps its own by name.
    """
    replaced: list[tuple[torch.Tensor, Loader | None, Loader]] = []
    for destination in destinations(model):
        tensor = destination.tensor
        before = getattr(tensor, "weight_loader", None)
        loader = replace(destination, before or default_weight_loader)
        tensor.weight_loader = loader
        replaced.append((tensor, before, loader))
    try:
        yield
    finally:
        for tensor, before, loader in replaced:
            if getattr(tensor, "weight_loader", None) is not loader:
                continue  # vLLM has restored the original
            if before is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = before


def loaded_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the weight passed to a loader: after the parameter, before arguments that differ by kind."""
    return kwargs["loaded_weight"] if "loaded_weight" in kwargs else args[1]


# -- a dry run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One call of a weight loader."""

    destination: Destination
    details: dict[str, Any]
    """Further arguments of the loader: `shard_id`, `expert_id` …"""


class _Origins(TorchDispatchMode):
    """Tracks the checkpoint tensors from which each tensor is computed or viewed."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage()._cdata: {name} for name, tensor in weights.items()}
        self._kept: list[torch.Tensor] = []  # keeps storages alive, so that their identities are not reused

    def of(self, tensor: torch.Tensor) -> set[str]:
        return self._names.get(tensor.untyped_storage()._cdata, set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        origins = set().union(*map(self.of, _tensors_in((args, kwargs))))
        for tensor in _tensors_in(output) if origins else ():
            self._names[tensor.untyped_storage()._cdata] = origins | self.of(tensor)
            self._kept.append(tensor)
        return output


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def arrivals_of(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor], optional: Collection[str]
) -> tuple[dict[str, list[Arrival]], dict[str, set[str]]]:
    """Find the loaders that `load_weights` calls for each name, in a dry run without loading.

    The model must be prepared for a reload (`initialize_layerwise_reload`).

    Args:
        weights: all checkpoint tensors by name, on the meta device.
        optional: names the model need not know.

    Returns:
        The loader calls by name of the tensor, or of the tensor viewed; and by layer path the names of all tensors that
        contribute to the layer, computed ones included.

    Raises:
        ValueError, KeyError: the model's own, for any other unknown name.
    """
    arrivals: dict[str, list[Arrival]] = defaultdict(list)
    sources: dict[str, set[str]] = defaultdict(set)
    by_storage = {tensor.untyped_storage()._cdata: name for name, tensor in weights.items()}
    origins = _Origins(weights)

    def replace(destination: Destination, loader: Loader) -> Loader:
        signature = inspect.signature(loader)

        def note(*args: Any, **kwargs: Any) -> bool:
            weight = loaded_weight(args, kwargs)
            sources[destination.path.rpartition(".")[0]].update(origins.of(weight))
            name = by_storage.get(weight.untyped_storage()._cdata)
            if name is not None:
                details = dict(list(signature.bind(*args, **kwargs).arguments.items())[2:])
                arrivals[name].append(Arrival(destination=destination, details=details))
            return True  # experts: report as loaded here

        return note

    with loaders_replaced(model, replace), disable_mtp_completeness_check(), origins:
        model.load_weights(iter([(name, tensor) for name, tensor in weights.items() if name not in optional]))
        for name in optional:
            with contextlib.suppress(ValueError, KeyError, AttributeError):  # models differ in how they refuse
                model.load_weights(iter([(name, weights[name])]))
    return dict(arrivals), dict(sources)


def held_dtypes(arrivals: dict[str, list[Arrival]], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Floating-point dtype in the engine by checkpoint name, if it differs from the checkpoint's."""
    held = {
        name: functools.reduce(torch.promote_types, {call.destination.tensor.dtype for call in calls})
        for name, calls in arrivals.items()
    }
    return {
        name: dtype
        for name, dtype in held.items()
        if dtype != weights[name].dtype and dtype.is_floating_point and weights[name].is_floating_point()
    }


# -- experts in one call -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLoad:
    """A single load of one part of all experts of a layer: vLLM's loader also accepts [experts, rows, columns]."""

    layer: RoutedExperts
    name: str
    weight_name: str
    shard_id: str

    def load(self, weight: torch.Tensor) -> None:
        parameter = getattr(self.layer, self.name)
        parameter.weight_loader(
            param=parameter,
            loaded_weight=weight,
            weight_name=self.weight_name,
            shard_id=self.shard_id,
            expert_id=0,
            return_success=True,
        )


def whole_loads(parts: Sequence[Sequence[str]], arrivals: dict[str, list[Arrival]]) -> list[WholeLoad] | None:
    """Return one load per part, if all experts go, unchanged and in order, to one tensor of a layer with all experts.

    Args:
        parts: checkpoint names, part by part, expert by expert.

    Returns:
        None if experts have to be loaded one by one: expert parallelism, redundant or quantised experts.
    """
    return None if None in (loads := [_whole_load(part, arrivals) for part in parts]) else loads  # type: ignore[return-value]


def _whole_load(names: Sequence[str], arrivals: dict[str, list[Arrival]]) -> WholeLoad | None:
    calls = [arrivals.get(name, []) for name in names]
    if any(len(each) != 1 for each in calls):
        return None
    first = calls[0][0]
    layer, details = first.destination.layer, first.details
    one_tensor = all(call.destination is first.destination for (call,) in calls)
    one_shard = all(call.details.get("shard_id") == details.get("shard_id") for (call,) in calls)
    in_order = [call.details.get("expert_id") for (call,) in calls] == list(range(len(names)))
    if not (one_tensor and one_shard and in_order and isinstance(layer, RoutedExperts)):
        return None
    holds_all = layer.local_num_experts == layer.global_num_experts == len(names) == len(first.destination.tensor)
    as_they_are = type(layer.quant_method) is UnquantizedFusedMoEMethod
    padded = layer.moe_config.tp_shard_with_padding
    transposed = getattr(first.destination.tensor, "is_transposed", False)
    if not (holds_all and as_they_are) or padded or transposed:
        return None
    weight_name = details["weight_name"]
    return WholeLoad(layer=layer, name=first.destination.name, weight_name=weight_name, shard_id=details["shard_id"])
