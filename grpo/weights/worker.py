"""The engine's side of a push: vLLM's weight-transfer engines, made to count what arrived.

vLLM itself proves nothing about a push (0.31): `load_weights` returns `qkv_proj` as loaded with `v_proj` missing, the
built-in worker throws that return value away, a layer that received nothing keeps its old tensors behind a log line,
and a layer that received a part is completed with uninitialised memory. So both engines here count elements per layer
before vLLM finalises the reload. Runs in vLLM's worker processes; imports neither TRL nor DeepSpeed.
"""

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel


class IncompletePushError(RuntimeError):
    """A push left parameters of the engine without new values."""


def _padding_numel(layer: torch.nn.Module) -> int:
    """Elements of a vocabulary layer that no checkpoint holds: the rows that round this shard up."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    shard = layer.shard_indices
    rows = layer.num_embeddings_per_partition - (shard.org_vocab_end_index - shard.org_vocab_start_index)
    return rows * sum(
        parameter.numel() // parameter.shape[0] for parameter in layer._parameters.values() if parameter is not None
    )


def _missing_parts(layer_name: str, mapping: dict[str, list[str]], received: set[str]) -> list[str]:
    """Which checkpoint modules of a fused layer did not arrive: `v_proj` of `…self_attn.qkv_proj`."""
    parent, _, leaf = layer_name.rpartition(".")
    anchor = parent.partition("layers.")[2] or parent  # prefixes differ between checkpoint and vLLM, layer paths do not
    return [
        f"{parent}.{part}"
        for part in mapping.get(leaf, [leaf])
        if not any(f"{anchor}.{part}." in name for name in received)
    ]


def incomplete_layers(model: torch.nn.Module, *, tied: bool, received: set[str]) -> list[str]:
    """One line for each layer whose parameters did not all arrive since `initialize_layerwise_reload`.

    Allowed gaps: rows that pad the vocabulary; a tied head (its tensor is the embedding's); attention layers, which
    vLLM completes itself; buffers, which no checkpoint holds.

    Args:
        tied: whether the model's configuration ties the head to the embedding.
        received: names, as in the checkpoint, of all that was sent.
    """
    mapping = getattr(model, "packed_modules_mapping", None) or {}
    done: set[int] = set()
    for layer in model.modules():
        if not get_layerwise_info(layer).can_load():
            done.update(p.data_ptr() for p in layer._parameters.values() if p is not None and not p.is_meta)
    lines = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue  # complete already, or completed at the end
        expected = sum(get_tensor_load_numel(p) for p in layer._parameters.values() if p is not None)
        if info.load_numel >= expected - _padding_numel(layer):
            continue
        if tied and isinstance(layer, ParallelLMHead) and info.load_numel == 0 and info.kernel_tensors is not None:
            weight = info.kernel_tensors[0].get("weight")
            embedding_came = any("embed" in other for other in received)
            if weight is not None and (weight.data_ptr() in done or embedding_came):
                continue
        missing = _missing_parts(name, mapping, received)
        lines.append(
            f"{name}: {info.load_numel} of {expected} elements arrived"
            + (f", none from {', '.join(missing)}" if missing else "")
        )
    return lines


def refresh_packed_weights(model: torch.nn.Module) -> None:
    """Mend the two places where vLLM's CPU backend (0.31) leaves a reload half done, silently.

    It packs weights for its kernels when it loads them. A tied head receives nothing in a reload, so its packed copy
    stays the old one: log-probabilities are off by 0.4 to 1.7 (Qwen2, Qwen3). And experts are packed on the first load
    alone: a reload writes plain values where the kernel reads packed ones, off by 0.02 to 0.4 (Qwen3-MoE).
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch:
            for weight in (layer.w13_weight, layer.w2_weight):
                weight.data.copy_(cpu_prepack_moe_weight(weight.data, experts.isa))


class CountedReload(WeightTransferEngine):
    """The layer-wise reload with a proof of completeness at its end; mixed into both transports."""

    def start_weight_update(self) -> None:
        self._received: set[str] = set()
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Complete the reload.

        Raises:
            IncompletePushError: a layer did not get all of its elements; names the layers and what is missing.
        """
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        lines = incomplete_layers(self.model, tied=tied, received=self._received)
        if lines:
            shown = "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")
            raise IncompletePushError(f"the push is incomplete in {len(lines)} layers: {shown}")
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            refresh_packed_weights(self.model)

    def note_received(self, names: list[str]) -> None:
        """Record what one update brings; a name that comes twice would make the count believe in a full layer."""
        twice = [name for name in names if name in self._received]
        if twice:
            raise IncompletePushError(f"the push sends {twice[:3]} twice")
        self._received.update(names)


class CountedNCCLEngine(CountedReload, NCCLWeightTransferEngine):
    """vLLM's own NCCL engine, counted."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        super().init_transfer_engine(init_info)
        # vLLM goes on without NCCL when it cannot load it; a push would then "receive" uninitialised memory.
        if getattr(self.model_update_group, "disabled", False):
            raise RuntimeError("vLLM could not load NCCL in the engine: set vllm_sync_backend to 'shm', or mend NCCL")

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        self.note_received(update_info.names)
        super().receive_weights(update_info)


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Where the trainer's shared buffer is: an unnamed memory file, opened through the trainer's /proc entry."""

    path: str
    num_bytes: int


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """What stands in the buffer now: parameters at byte offsets, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class CountedShmEngine(CountedReload, WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Reads parameters out of memory shared with the trainer: for CPUs, and for nodes whose NCCL does not serve."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    _buffer: torch.Tensor | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        descriptor = os.open(init_info.path, os.O_RDONLY)
        try:
            mapped = mmap.mmap(descriptor, init_info.num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        import warnings

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is copied from only
            self._buffer = torch.frombuffer(mapped, dtype=torch.uint8)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends with torch.accelerator.synchronize(), which raises without an accelerator (vLLM 0.31).
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        assert self._buffer is not None, "receive_weights before init_transfer_engine"
        self.note_received(update_info.names)
        weights = []
        for name, dtype_name, shape, offset in zip(
            update_info.names, update_info.dtype_names, update_info.shapes, update_info.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            view = self._buffer[offset : offset + num_bytes].view(dtype).view(shape)
            # A copy: the layer-wise reload keeps references until a whole layer has arrived, and the trainer fills
            # this buffer again before that. Without it weights are wrong and nothing says so.
            weights.append((name, view.to(self.device, copy=True)))
        with disable_mtp_completeness_check():
            self.model.load_weights(weights)

    def shutdown(self) -> None:
        self._buffer = None
