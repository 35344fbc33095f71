"""The trainer's weights as vLLM's `WeightSource`: gathered in buckets, under the names of the checkpoint."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource


def make_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Cut parameters, in order, into runs of at most `bucket_bytes`; a larger parameter is a bucket of its own.

    Args:
        sizes_bytes: size of each parameter, whole.

    Returns:
        Indices into `sizes_bytes`, each exactly once, in order.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes_bytes):
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def is_zero3(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed ZeRO-3 holds this parameter partitioned."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter; `parameter.shape` is empty while ZeRO-3 has it partitioned."""
    return torch.Size(parameter.ds_shape) if is_zero3(parameter) else parameter.shape


class GatheredSource(WeightSource):
    """Every parameter of `model` once, whole, in the engine's dtype.

    Iteration is collective over the trainer's world group under ZeRO-3: all ranks must iterate, in lockstep, to the
    end (`finish_walk` when a consumer failed). With ZeRO-2 or less, DDP or one process nothing is gathered.

    A tied weight comes once, under its first name. Experts that transformers holds fused in memory come split, as
    `save_pretrained` writes them (`transformers.core_model_loading.revert_weight_conversion`).

    Args:
        model: the unwrapped transformers model.
        wire_dtype: dtype in which floating-point parameters travel: the engine's.
        bucket_bytes: upper size of what is gathered at a time, in the trainer's dtype.
    """

    def __init__(self, model: nn.Module, *, wire_dtype: torch.dtype, bucket_bytes: int) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        named = list(model.named_parameters())  # a tied parameter appears once
        sizes = [whole_shape(p).numel() * p.element_size() for _, p in named]
        self.buckets = [[named[i] for i in bucket] for bucket in make_buckets(sizes, bucket_bytes)]
        self._metadata: list[ParamMeta] | None = None
        self._walk: Iterator[tuple[str, torch.Tensor]] | None = None
        self.walks_begun = 0
        self.gather_s = 0.0
        """Seconds of the last walk spent gathering and renaming."""

    def metadata(self) -> list[ParamMeta]:
        if self._metadata is None:
            self._metadata = [
                ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                for bucket in self.buckets
                for name, tensor in self._to_wire(
                    {n: torch.empty(whole_shape(p), dtype=p.dtype, device="meta") for n, p in bucket}
                )
            ]
            names = [meta.name for meta in self._metadata]
            assert len(set(names)) == len(names), "a checkpoint name comes out of two buckets"
        return self._metadata

    @property
    def wire_bytes(self) -> int:
        """Bytes that one walk yields."""
        return sum(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self.metadata())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.walks_begun += 1
        self._walk = self._iterate()
        return self._walk

    def _iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.gather_s = 0.0
        for bucket in self.buckets:
            begun = time.perf_counter()
            with _gathered([parameter for _, parameter in bucket]):
                wire = self._to_wire({name: parameter.detach() for name, parameter in bucket})
                self.gather_s += time.perf_counter() - begun
                yield from wire

    def finish_walk(self, walks_begun_before: int) -> None:
        """Iterate what is left of this push's walk and throw it away, so that no other rank waits in a gather.

        Args:
            walks_begun_before: `walks_begun` before the push.
        """
        walk = iter(self) if self.walks_begun == walks_begun_before else self._walk
        assert walk is not None
        for _ in walk:
            pass

    def _to_wire(self, tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        return [
            (name, tensor.to(self._wire_dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in revert_weight_conversion(self._model, tensors).items()
        ]


def _gathered(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
    partitioned = [parameter for parameter in parameters if is_zero3(parameter)]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)
