"""The trainer's weights as they travel: which of them a push takes, in which buckets, under the checkpoint's names."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from grpo.pending_weights import conversion_units
from grpo.weights.buckets import Bucket, ParamMeta, bucket_limit, make_buckets, meta_bytes, packed_bytes
from grpo.weights.gather import ShardGather, has_plain_shards, is_zero3, whole_shape
from grpo.weights.layers import frozen_names


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """What one push takes."""

    buckets: tuple[Bucket, ...]
    held: tuple[str, ...]
    """Checkpoint names that stay behind: frozen layers, which an earlier push has brought."""

    @property
    def metas(self) -> list[ParamMeta]:
        return [meta for bucket in self.buckets for meta in bucket.metas]

    @property
    def num_bytes(self) -> int:
        """What travels to each engine."""
        return sum(meta_bytes(meta) for meta in self.metas)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Parameters that become a checkpoint's tensors together; one, for most."""

    names: tuple[str, ...]
    metas: tuple[ParamMeta, ...]
    as_it_is: bool
    """One tensor under its own name."""


class GatheredSource:
    """Every parameter of `model` once, whole, in the engine's dtype, a bucket at a time.

    Under ZeRO-3 `meet` and `fill` are collective over the trainer's ranks, which go through the buckets of the same
    plan in the same order. With ZeRO-2 or less, DDP or one process nothing is gathered.

    A tied weight comes once, under its first name. Experts that transformers holds fused in memory come split, as
    `save_pretrained` writes them (`transformers.core_model_loading.revert_weight_conversion`).

    Args:
        model: the unwrapped transformers model.
        wire_dtype: dtype in which floating-point parameters travel: the engine's.
        bucket_bytes: upper size of a bucket as it travels; a larger parameter is a bucket of its own.
    """

    def __init__(self, model: nn.Module, *, wire_dtype: torch.dtype, bucket_bytes: int) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._parameters = dict(model.named_parameters())  # a tied parameter appears once
        self._units = self._describe_units()
        total = sum(packed_bytes(unit.metas) for unit in self._units)
        self._bucket_bytes = bucket_limit(bucket_bytes, total)
        self._as_they_are = {unit.names[0] for unit in self._units if unit.as_it_is}
        self._sent: frozenset[str] = frozenset()  # parameters that were frozen when the engines last got them
        self._plans: dict[frozenset[str], PushPlan] = {}  # by the parameters that stay behind
        self._gather: ShardGather | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def buffer_bytes(self) -> int:
        """Room for any bucket of any plan."""
        return max(self._bucket_bytes, *(packed_bytes(unit.metas) for unit in self._units))

    # -- what travels ---------------------------------------------------------------------------------------------

    def plan(self) -> PushPlan:
        """The next push: everything, but for layers of which nothing is trained and which the engines have already."""
        left = frozen_names(self._model) & self._sent
        if left not in self._plans:
            units = [unit for unit in self._units if not left.issuperset(unit.names)]
            cuts = make_buckets([packed_bytes(unit.metas) for unit in units], self._bucket_bytes)
            taken = {meta.name for unit in units for meta in unit.metas}
            every = [meta.name for unit in self._units for meta in unit.metas]
            self._plans[left] = PushPlan(
                buckets=tuple(self._bucket([units[index] for index in cut]) for cut in cuts),
                held=tuple(name for name in every if name not in taken),
            )
        return self._plans[left]

    def mark_sent(self) -> None:
        """Say that a push of the last plan has reached the engines.

        What is trained now may change before it is frozen, and travels once more then.
        """
        self._sent = frozen_names(self._model)

    def _bucket(self, units: Sequence[_Unit]) -> Bucket:
        return Bucket(
            parameters=tuple((name, self._parameters[name]) for unit in units for name in unit.names),
            metas=tuple(meta for unit in units for meta in unit.metas),
        )

    def _describe_units(self) -> list[_Unit]:
        placeholders = {
            name: torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")
            for name, parameter in self._parameters.items()
        }
        units = []
        for names in conversion_units(self._to_checkpoint, placeholders):
            tensors = self._to_checkpoint({name: placeholders[name] for name in names})
            metas = tuple(
                ParamMeta(name, self._dtype_of(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()
            )
            as_it_is = len(names) == 1 and tensors.get(names[0]) is placeholders[names[0]]
            units.append(_Unit(names=tuple(names), metas=metas, as_it_is=as_it_is))
        return units

    def _to_checkpoint(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, tensors)

    # -- bringing it together -------------------------------------------------------------------------------------

    def meet(self, *, receives: bool) -> None:
        """Once, before the first `fill`; collective under ZeRO-3.

        Args:
            receives: whether this rank will ask for what it gathers, ever.
        """
        sharded = [parameter for parameter in self._parameters.values() if is_zero3(parameter)]
        if sharded and self._gather is None:
            self._group = sharded[0].ds_process_group
            self._gather = ShardGather(self._group, dtype=self._wire_dtype, receives=receives)

    def end_push(self) -> None:
        """After the last `fill` of a push, or the one that broke it: hold none of its memory; on every rank."""
        if self._gather is not None:
            self._gather.release()

    @torch.no_grad()
    def fill(self, bucket: Bucket, places: Sequence[torch.Tensor] | None) -> None:
        """Gather a bucket, and write it where it is wanted. Collective under ZeRO-3.

        Args:
            places: for each of `bucket.metas` a contiguous tensor of that dtype and shape, on any device; None to take
                part and keep nothing. On CUDA the copies are queued on the current stream.
        """
        wholes = None if places is None else self._wholes(bucket, places)
        plain: list[str] = []
        left: list[str] = []
        for name, parameter in bucket.parameters:
            is_plain = is_zero3(parameter) and has_plain_shards(parameter, self._group)
            (plain if is_plain else left).append(name)
        if plain:
            assert self._gather is not None, "fill before meet"
            flat = None if wholes is None else [wholes[name].view(-1) for name in plain]
            self._gather.gather([self._parameters[name] for name in plain], flat)
        with _gathered([self._parameters[name] for name in left]):
            for name, whole in (wholes or {}).items():
                if name in left:
                    whole.copy_(self._parameters[name])
        if wholes is not None and places is not None:
            self._convert(bucket, wholes, places)

    def _wholes(self, bucket: Bucket, places: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Where each parameter is put together: its place, or memory for the time being if it travels as others."""
        by_name = {meta.name: place for meta, place in zip(bucket.metas, places, strict=True)}
        return {
            name: by_name[name]
            if name in self._as_they_are
            else torch.empty(whole_shape(parameter), dtype=self._dtype_of(parameter), device=parameter.device)
            for name, parameter in bucket.parameters
        }

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return self._wire_dtype if parameter.is_floating_point() else parameter.dtype

    def _convert(self, bucket: Bucket, wholes: dict[str, torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        to_convert = {name: whole for name, whole in wholes.items() if name not in self._as_they_are}
        converted = self._to_checkpoint(to_convert) if to_convert else {}
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name in converted:
                place.copy_(converted[meta.name])


def _gathered(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
    partitioned = [parameter for parameter in parameters if is_zero3(parameter)]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)
