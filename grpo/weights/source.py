"""The trainer's weights as they travel: which of them a push takes, in which buckets, under the checkpoint's names."""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from grpo.weights.buckets import Bucket, ParamMeta, aligned, bucket_limit, make_buckets, meta_bytes, packed_bytes
from grpo.weights.gather import ShardGather, has_plain_shards, is_zero3, whole_shape
from grpo.weights.layers import frozen_names, persistent_buffers
from grpo.weights.names import conversion_units
from grpo.weights.wire_format import StackedExperts, WireFormat


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
    """Tensors of the model that become a checkpoint's tensors together; one, for most."""

    names: tuple[str, ...]
    metas: tuple[ParamMeta, ...]
    as_it_is: bool
    """One tensor under its own name."""
    experts: StackedExperts | None = None
    """What it is, if it is all experts of one projection."""


class GatheredSource:
    """Every parameter and persistent buffer of `model` once, whole, in the dtype that the engine holds, a bucket at a
    time: what `save_pretrained` writes.

    Under ZeRO-3 `meet` and `fill` are collective over the trainer's ranks, which go through the buckets of the same
    plan in the same order. With ZeRO-2 or less, DDP or one process nothing is gathered; nor are buffers, which are
    whole on every rank.

    A tied weight comes once, under its first name. Experts that transformers holds fused in memory come as they are
    where the engine said so (`adopt`), or split, as `save_pretrained` writes them
    (`transformers.core_model_loading.revert_weight_conversion`).

    Args:
        model: the unwrapped transformers model.
        wire_dtype: dtype in which floating-point tensors travel: the engine's, but for what `adopt` says.
        bucket_bytes: upper size of a bucket as it travels; a larger parameter is a bucket of its own.
    """

    def __init__(self, model: nn.Module, *, wire_dtype: torch.dtype, bucket_bytes: int) -> None:
        self._model = model
        self._wire_dtype = wire_dtype
        self._asked_bytes = bucket_bytes
        self._tensors = _travelling(model)
        self._described = self._describe_units()
        self._gather: ShardGather | None = None
        self._group: dist.ProcessGroup | None = None
        self.adopt(WireFormat())

    def adopt(self, wire_format: WireFormat) -> None:
        """Take what the engines answered; on every rank, before the push group is opened."""
        computed = {*wire_format.computed}
        self._units = [
            _in_format(unit, wire_format)
            for unit in self._described
            if not computed.issuperset(meta.name for meta in unit.metas)
        ]
        total = sum(packed_bytes(unit.metas) for unit in self._units)
        self._bucket_bytes = bucket_limit(self._asked_bytes, total)
        self._as_they_are = {unit.names[0] for unit in self._units if unit.as_it_is}
        self._travel_dtypes = {name: _common_dtype(unit) for unit in self._units for name in unit.names}
        self._sent: frozenset[str] = frozenset()  # parameters that were frozen when the engines last got them
        self._plans: dict[frozenset[str], PushPlan] = {}  # by the parameters that stay behind

    @property
    def checkpoint_metas(self) -> list[ParamMeta]:
        """All that there is, under the checkpoint's names, experts one by one, in the wire dtype."""
        return [meta for unit in self._described for meta in unit.metas]

    @property
    def experts(self) -> list[StackedExperts]:
        return [unit.experts for unit in self._described if unit.experts is not None]

    @property
    def buffers(self) -> list[str]:
        """Names in the checkpoint of what are buffers here."""
        return [
            meta.name
            for unit in self._described
            if not any(isinstance(self._tensors[name], nn.Parameter) for name in unit.names)
            for meta in unit.metas
        ]

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
            parameters=tuple((name, self._tensors[name]) for unit in units for name in unit.names),
            metas=aligned([meta for unit in units for meta in unit.metas]),
        )

    def _describe_units(self) -> list[_Unit]:
        placeholders = {
            name: torch.empty(whole_shape(tensor), dtype=self._dtype_of(tensor), device="meta")
            for name, tensor in self._tensors.items()
        }
        units = []
        for names in conversion_units(self._to_checkpoint, placeholders):
            tensors = self._to_checkpoint({name: placeholders[name] for name in names})
            units.append(
                _Unit(
                    names=tuple(names),
                    metas=tuple(ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()),
                    as_it_is=len(names) == 1 and tensors.get(names[0]) is placeholders[names[0]],
                    experts=self._stacked(names[0], placeholders[names[0]], len(tensors)) if len(names) == 1 else None,
                )
            )
        return units

    def _stacked(self, name: str, placeholder: torch.Tensor, num_outputs: int) -> StackedExperts | None:
        """Whether `num_outputs` tensors of the checkpoint are equal parts of each expert's rows, as they stand.

        Told from what the conversion makes of a small tensor with a different number in every place.
        """
        if placeholder.dim() != 3 or num_outputs < 2 or num_outputs % len(placeholder):
            return None
        experts, num_parts = len(placeholder), num_outputs // len(placeholder)
        numbers = torch.arange(experts * 2 * num_parts * 3).view(experts, 2 * num_parts, 3)
        wanted = {
            tuple(part.flatten().tolist()): (index, expert)
            for index, parts in enumerate(numbers.chunk(num_parts, dim=1))
            for expert, part in enumerate(parts)
        }
        names: dict[tuple[int, int], str] = {}
        for output, tensor in self._to_checkpoint({name: numbers}).items():
            place = wanted.get(tuple(tensor.flatten().tolist()))
            if place is None or tensor.shape != (2, 3):
                return None
            names[place] = output
        if len(names) != num_outputs:
            return None
        parts = tuple(tuple(names[part, expert] for expert in range(experts)) for part in range(num_parts))
        return StackedExperts(name=name, shape=tuple(placeholder.shape), parts=parts)

    def _to_checkpoint(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, tensors)

    # -- bringing it together -------------------------------------------------------------------------------------

    def meet(self, *, receives: bool) -> None:
        """Once, before the first `fill`; collective under ZeRO-3.

        Args:
            receives: whether this rank will ask for what it gathers, ever.
        """
        sharded = [tensor for tensor in self._tensors.values() if is_zero3(tensor)]
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
        for name, tensor in bucket.parameters:
            is_plain = self._gather is not None and is_zero3(tensor) and has_plain_shards(tensor, self._group)
            (plain if is_plain and self._travel_dtypes[name] == self._wire_dtype else left).append(name)
        if self._gather is not None and plain:
            flat = None if wholes is None else [wholes[name].view(-1) for name in plain]
            self._gather.gather([self._tensors[name] for name in plain], flat)
        with _gathered([self._tensors[name] for name in left]):
            for name, whole in (wholes or {}).items():
                if name in left:
                    whole.copy_(self._tensors[name])
        if wholes is not None and places is not None:
            self._convert(bucket, wholes, places)

    def _wholes(self, bucket: Bucket, places: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Where each tensor is put together: its place, or memory for the time being if it travels as others."""
        by_name = {meta.name: place for meta, place in zip(bucket.metas, places, strict=True)}
        return {
            name: by_name[name]
            if name in self._as_they_are
            else torch.empty(whole_shape(tensor), dtype=self._travel_dtypes[name], device=tensor.device)
            for name, tensor in bucket.parameters
        }

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._wire_dtype if tensor.is_floating_point() else tensor.dtype

    def _convert(self, bucket: Bucket, wholes: dict[str, torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        to_convert = {name: whole for name, whole in wholes.items() if name not in self._as_they_are}
        converted = self._to_checkpoint(to_convert) if to_convert else {}
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name in converted:
                place.copy_(converted[meta.name])


def _travelling(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, in the order of the modules; a tied parameter appears once."""
    buffers = persistent_buffers(model)
    names = [name for path, module in model.named_modules() for name in _own_names(path, module)]
    tensors = dict(model.named_parameters()) | buffers
    return {name: tensors[name] for name in names if name in tensors}


def _own_names(path: str, module: nn.Module) -> list[str]:
    return [f"{path}.{leaf}" if path else leaf for leaf in (*module._parameters, *module._buffers)]


def _in_format(unit: _Unit, wire_format: WireFormat) -> _Unit:
    dtypes = {name: getattr(torch, dtype) for name, dtype in wire_format.dtypes.items()}
    metas = tuple(replace(meta, dtype=dtypes.get(meta.name, meta.dtype)) for meta in unit.metas)
    stack = unit.experts
    if stack is None or stack.name not in wire_format.whole_experts:
        return replace(unit, metas=metas)
    assert len({meta.dtype for meta in metas}) == 1, f"{stack.name}: experts of one layer in several dtypes"
    whole = ParamMeta(stack.name, metas[0].dtype, stack.shape)
    return replace(unit, metas=(whole,), as_it_is=True)


def _common_dtype(unit: _Unit) -> torch.dtype:
    """In which the tensors of a unit are put together before they are converted."""
    return functools.reduce(torch.promote_types, (meta.dtype for meta in unit.metas))


def _gathered(tensors: list[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    partitioned = [tensor for tensor in tensors if is_zero3(tensor)]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)
