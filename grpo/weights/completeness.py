"""Whether all of a weight sync arrived, distinguished from vLLM's layer-wise reload before it is finalised.

vLLM itself proves nothing about a weight sync (0.31): `load_weights` returns `qkv_proj` as loaded with `v_proj`
missing, the built-in worker throws that return value away, a layer that received nothing keeps its old tensors behind a
log line, and a layer that received a part is completed with uninitialised memory.
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
    """A weight sync left parameters of the engine without new values."""


class ChangedBitsError(RuntimeError):
    """Other bits reached the engine than the trainer has sent."""


def shown(lines: Sequence[str]) -> str:
    """The first of many lines, for a message."""
    return "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")


def unsent_names(*, known: Collection[str], received: Collection[str], held: Collection[str]) -> list[str]:
    """One line for each tensor that earlier weight syncs brought, and that this one neither sends nor says to leave
    out; and for each that it leaves out though no weight sync has brought it.

    Args:
        known: names, as in the checkpoint, of all that earlier weight syncs brought.
        held: names that this weight sync says to leave out.
    """
    return [f"{name}: not sent, and not among the frozen ones" for name in sorted({*known} - {*received, *held})] + [
        f"{name}: left out, but never sent before" for name in sorted({*held} - {*known})
    ]


def unreached_tensors(
    places: Collection[Destination], *, tied: bool, filled: Collection[str], reached: Collection[str]
) -> list[str]:
    """One line for each tensor of the engine that would hold no value of a weight sync when the reload is finalised.

    Either no weight sync has ever filled it, and it holds what dummy loading left there; or others of its layer came
    and it did not, and vLLM would complete the layer with uninitialised memory.

    Args:
        places: all that a checkpoint may fill.
        tied: whether the model's configuration ties the head to the embedding.
        filled: paths of what a weight loader has filled in this weight sync.
        reached: paths of what one has filled in this weight sync or an earlier one.
    """
    touched = {id(place.layer) for place in places if place.path in filled and place.name not in SKIP_TENSORS}
    lines = []
    for place in places:
        if place.path not in reached and not is_set_by_vllm(place, tied=tied):
            lines.append(f"{place.path}: no weight sync has brought it, it holds the noise that vLLM started with")
        elif (
            place.path not in filled
            and id(place.layer) in touched
            and place.name not in SKIP_TENSORS  # they stay where they are
            and not is_deferred_attention_layer(place.layer)
        ):
            lines.append(f"{place.path}: not sent, though others of its layer were")
    return lines


def _padding_numel(layer: torch.nn.Module) -> int:
    """Elements of a vocabulary layer that no checkpoint holds: the rows that round this shard up."""
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
    """One line for each layer whose parameters did not all arrive since `initialize_layerwise_reload`.

    Allowed gaps: rows that pad the vocabulary; a tied head (its tensor is the embedding's); attention layers, which
    vLLM completes itself; buffers, which `unreached_tensors` looks after; and a layer of which nothing was sent and
    nothing is missing since an earlier weight sync.

    Args:
        tied: whether the model's configuration ties the head to the embedding.
        received: names, as in the checkpoint, of all that was sent.
        synced_before: whether an earlier weight sync was completed.
        sources: by a layer's path, the names, as in the checkpoint, of what fills it; see `arrivals_of`.
    """
    received = {name for name in received if name.rpartition(".")[2] not in SKIP_LOAD_TENSORS}  # vLLM counts none
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
            if parameter is not None and leaf not in SKIP_LOAD_TENSORS  # they are not counted when they arrive
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
