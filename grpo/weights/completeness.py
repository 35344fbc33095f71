"""Completeness check of a weight sync, based on vLLM's layer-wise reload before it is finalised.

vLLM itself does not check (0.31): `load_weights` returns `qkv_proj` as loaded with `v_proj` missing, and the built-in
worker ignores the return value. A layer without new tensors keeps its old ones with a log line; a partly received layer
is completed with uninitialised memory.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from grpo.weights.destinations import Destination, is_set_by_vllm


class IncompleteSyncError(RuntimeError):
    """A weight sync left engine parameters without new values."""


class ChangedBitsError(RuntimeError):
    """The engine received other bits than the trainer sent."""


def shown(lines: Sequence[str]) -> str:
    """Join the first of many lines, for a message."""
    return "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")


def unsent_names(*, known: Collection[str], received: Collection[str], held: Collection[str]) -> list[str]:
    """List the tensors from earlier weight syncs that this one neither sends nor declares as held, and the held ones
    that were never sent; one line each.

    Args:
        known: checkpoint names of all tensors sent before.
        held: names declared as held by this weight sync.
    """
    return [f"{name}: not sent, and not among the frozen ones" for name in sorted({*known} - {*received, *held})] + [
        f"{name}: left out, but never sent before" for name in sorted({*held} - {*known})
    ]


def unreached_tensors(
    places: Collection[Destination], *, tied: bool, filled: Collection[str], reached: Collection[str]
) -> list[str]:
    """List the engine's tensors without a valid value after the reload; one line each.

    Either no weight sync has ever filled the tensor, and it holds values from dummy loading; or only other tensors of
    its layer came, and vLLM would complete the layer with uninitialised memory.

    Args:
        places: all tensors a checkpoint may fill.
        tied: the model's configuration ties the head to the embedding.
        filled: paths of tensors filled by a weight loader in this weight sync.
        reached: paths of tensors filled in this or an earlier weight sync.
    """
    touched = {id(place.layer) for place in places if place.path in filled and place.name not in SKIP_TENSORS}
    lines = []
    for place in places:
        if place.path not in reached and not is_set_by_vllm(place, tied=tied):
            lines.append(f"{place.path}: no weight sync has brought it, it holds the noise that vLLM started with")
        elif (
            place.path not in filled
            and id(place.layer) in touched
            and place.name not in SKIP_TENSORS  # they are not moved
            and not is_deferred_attention_layer(place.layer)
        ):
            lines.append(f"{place.path}: not sent, though others of its layer were")
    return lines


def _padding_numel(layer: torch.nn.Module) -> int:
    """Elements of a vocabulary layer missing in any checkpoint: padding rows of this shard."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    shard = layer.shard_indices
    rows = layer.num_embeddings_per_partition - (shard.org_vocab_end_index - shard.org_vocab_start_index)
    return rows * sum(
        parameter.numel() // parameter.shape[0] for parameter in layer._parameters.values() if parameter is not None
    )


def incomplete_layers(
    model: torch.nn.Module,
    *,
    tied: bool,
    received: set[str],
    synced_before: bool,
    sources: Mapping[str, Collection[str]],
) -> list[str]:
    """List the layers whose parameters did not all arrive since `initialize_layerwise_reload`; one line each.

    Allowed gaps: padding rows of the vocabulary; a tied head (its tensor is the embedding's); attention layers, which
    vLLM completes itself; buffers, checked by `unreached_tensors`; and a layer complete from an earlier weight sync,
    without any sent tensor.

    Args:
        tied: the model's configuration ties the head to the embedding.
        received: checkpoint names of all sent tensors.
        synced_before: an earlier weight sync was completed.
        sources: checkpoint names of the tensors that fill a layer, by its path; see `arrivals_of`.
    """
    # vLLM does not count them
    received = {name for name in received if name.rpartition(".")[2] not in SKIP_LOAD_TENSORS}
    done: set[int] = set()
    for layer in model.modules():
        if not get_layerwise_info(layer).can_load():
            done.update(p.data_ptr() for p in layer._parameters.values() if p is not None and not p.is_meta)
    lines = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue  # complete already, or completed at the end
        expected = sum(
            get_tensor_load_numel(parameter)
            for leaf, parameter in layer._parameters.items()
            if parameter is not None and leaf not in SKIP_LOAD_TENSORS  # not counted on arrival
        )
        if info.load_numel >= expected - _padding_numel(layer):
            continue
        wanted = {*sources.get(name, ())}
        if info.load_numel == 0 and wanted.isdisjoint(received) and synced_before:
            continue
        if tied and isinstance(layer, ParallelLMHead) and info.load_numel == 0 and info.kernel_tensors is not None:
            weight = info.kernel_tensors[0].get("weight")
            embedding_came = any("embed" in other for other in received)
            if weight is not None and (weight.data_ptr() in done or embedding_came):
                continue
        lines.append(
            f"{name}: {info.load_numel} of {expected} elements arrived"
            + (f", without {', '.join(missing)}" if (missing := sorted(wanted - received)) else "")
        )
    return lines
