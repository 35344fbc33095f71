"""Source of a weight sync: the tensors to send, their buckets, and their checkpoint names."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo.model.four_bit import dequantise, is_four_bit
from grpo.model.text_part import tower_tensors
from grpo.weights.buckets import Bucket, ParamMeta, aligned, bucket_limit, described, make_buckets, packed_bytes
from grpo.weights.gather import ShardGather, gathered, has_plain_shards, is_zero3, whole_shape
from grpo.weights.held import HeldParameters
from grpo.weights.layers import frozen_names, layer_groups, persistent_buffers
from grpo.weights.names import ADAPTER_PREFIX, some
from grpo.weights.units import Unit, common_dtype, described_units, in_format
from grpo.weights.wire_format import StackedExperts, WireFormat

if TYPE_CHECKING:
    from grpo.weights.adapters import LayerAdapter, Lora  # needs PEFT


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncPlan:
    """Tensors of one weight sync."""

    buckets: tuple[Bucket, ...]
    held: tuple[str, ...]
    """Checkpoint names left out: frozen layers sent in an earlier weight sync."""

    @property
    def metas(self) -> list[ParamMeta]:
        return [meta for bucket in self.buckets for meta in bucket.metas]

    @property
    def is_adapters(self) -> bool:
        """True if only adapters are sent, and no weight of the base."""
        return all(meta.name.startswith(ADAPTER_PREFIX) for meta in self.metas)

    @property
    def num_bytes(self) -> int:
        """Bytes sent to each engine."""
        return packed_bytes(self.metas, alignment_bytes=1)


@dataclass(eq=False)
class GatheredSource:
    """Gathers every parameter and persistent buffer of `model` once, unsharded, in the engine's dtype, one bucket at a
    time: the tensors `save_pretrained` writes.

    Under ZeRO-3 `meet` and `fill` are collective over the trainer's ranks, which process the buckets of the same plan
    in the same order. With ZeRO-2 or less, DDP or one process nothing is gathered; nor are buffers, which every rank
    has in full.

    4-bit weights are sent dequantised, one at a time, as their layers use them.

    Adapters are sent beside the weights, B multiplied by its scale, under PEFT's names; or merged into the weights they
    change.

    A tied weight is sent once, under its first name. Experts fused in memory by transformers are sent fused if the
    engine supports it (`adopt`), otherwise split as `save_pretrained` writes them
    (`transformers.core_model_loading.revert_weight_conversion`).
    """

    model: nn.Module
    """Unwrapped transformers model."""
    _: KW_ONLY
    wire_dtype: torch.dtype
    """Dtype of sent floating-point tensors: the engine's, with exceptions from `adopt`."""
    bucket_bytes: int
    """Upper size of a bucket as sent; a larger parameter is a bucket of its own."""
    lora: "Lora | None" = None
    """Adapters of a PEFT model; `model` is its base."""
    takes_images: bool = False
    """True: towers are sent too. False: the text part alone."""

    def __post_init__(self) -> None:
        with self._plain_model():  # transformers walks over all modules for each name: twice as many with PEFT's
            towers = tower_tensors(self.model)
            self._left_out = frozenset() if self.takes_images else towers
            # Towers often have layers after those whose features the model uses. Nothing depends on them, as
            # verifications with an image show.
            self._may_lack = towers - self._left_out
            self._tensors = _travelling(self.model, self._left_out)
            placeholders = {
                name: torch.empty(whole_shape(tensor), dtype=self._dtype_of(tensor), device="meta")
                for name, tensor in self._tensors.items()
            }
            self._described = described_units(self._to_checkpoint, placeholders)
        self._scales: dict[str, float] = {}  # by an adapter's name of B in the weight sync
        self._adapter_of: dict[str, LayerAdapter] = {}  # by the weight it is merged into
        self._adapters: list[Unit] = []  # adapter parts sent alone
        if self.lora is not None and self.lora.merges:
            self._merge(self.lora.layers())
        elif self.lora is not None:
            self._adapters = [unit for layer in self.lora.layers() for unit in self._units_of(layer)]
        self._forms = {name: self._form(tensor) for name, tensor in self._tensors.items()}
        self._held = HeldParameters()
        self._gather: ShardGather | None = None
        self.times_forgotten = 0
        self.adopt(WireFormat())

    def adopt(self, wire_format: WireFormat) -> None:
        """Apply the engines' answer; on every rank, before the weight sync group is opened."""
        computed = {*wire_format.computed}
        self._units = [
            in_format(unit, wire_format)
            for unit in self._described
            if not computed.issuperset(meta.name for meta in unit.metas)
        ] + self._adapters
        total = sum(packed_bytes(unit.metas) for unit in self._units)
        self._bucket_bytes = bucket_limit(self.bucket_bytes, total)
        self._as_they_are = {unit.names[0] for unit in self._units if unit.as_it_is}
        self._travel_dtypes = {name: common_dtype(unit) for unit in self._units for name in unit.names}
        self._unplaced = {*wire_format.unplaced}
        self._held.forget()
        self._plans: dict[frozenset[str], WeightSyncPlan] = {}  # by the parameters left out

    @property
    def checkpoint_metas(self) -> list[ParamMeta]:
        """Metas of all weights, by checkpoint names, experts one by one, in the wire dtype."""
        return [meta for unit in self._described for meta in unit.metas]

    @property
    def experts(self) -> list[StackedExperts]:
        return [unit.experts for unit in self._described if unit.experts is not None]

    @property
    def buffers(self) -> list[str]:
        """Checkpoint names of buffers."""
        return [
            meta.name
            for unit in self._described
            if not any(isinstance(self._tensors[name], nn.Parameter) for name in unit.names)
            for meta in unit.metas
        ]

    @property
    def question(self) -> dict[str, Any]:
        """Question to the engines before the first weight sync; see `ask_engines`."""
        return {
            "metas": described(self.checkpoint_metas),
            "buffers": self.buffers,
            "experts": [asdict(stack) for stack in self.experts],
        }

    @property
    def buffer_bytes(self) -> int:
        """Capacity for any bucket of any plan."""
        return max(self._bucket_bytes, *(packed_bytes(unit.metas) for unit in self._units))

    # -- selecting ----------------------------------------------------------------------------------------------

    def plan(self) -> WeightSyncPlan:
        """Plan the next weight sync: all tensors, except frozen layers held by the engines.

        Raises:
            ValueError: on every rank alike; a trained tensor has no place in the engines, or a tensor has changed since
                the engines were asked about it.
        """
        self._look_up()
        self._refuse_unplaced()
        left = self._frozen() & self._held.names
        if left not in self._plans:
            units = [unit for unit in self._units if not left.issuperset(unit.names)]
            cuts = make_buckets([packed_bytes(unit.metas) for unit in units], self._bucket_bytes)
            self._plans[left] = WeightSyncPlan(
                buckets=tuple(self._bucket([units[index] for index in cut]) for cut in cuts),
                held=tuple(meta.name for unit in self._units if left.issuperset(unit.names) for meta in unit.metas),
            )
        return self._plans[left]

    def elements_converted(self, bucket: Bucket) -> int:
        """Number of elements in a bucket converted before sending: split, or merged with adapters."""
        return sum(whole_shape(t).numel() for name, t in bucket.parameters if name not in self._as_they_are)

    def mark_sent(self) -> None:
        """Record that a weight sync by the last plan has reached the engines.

        Tensors trained now may change before they are frozen, and will be sent again then.
        """
        self._held.hold({name: self._tensors[name] for name in sorted(self._frozen())})

    def forget_sent(self) -> None:
        """Record that the engines may hold none of these; on every rank."""
        self._held.forget()
        self.times_forgotten += 1

    def written(self, *, by_sums: bool) -> list[str]:
        """Frozen parameters held by the engines and modified on this rank since they were sent.

        Ranks may see different ones, but must plan alike: `send_again` gets the union on every rank.

        Args:
            by_sums: see `HeldParameters.written`.
        """
        return self._held.written(by_sums=by_sums)

    def send_again(self, names: Collection[str]) -> None:
        """Send held parameters again, each with its whole layer; on every rank."""
        if names:
            with self._plain_model():
                groups = layer_groups(self.model)
            written = {groups[name] for name in names}
            self._held.forget([name for name, group in groups.items() if group in written])

    def _look_up(self) -> None:
        """Look up the present tensor of each name: code may have replaced it since the last weight sync."""
        with self._plain_model():
            present = _travelling(self.model, self._left_out)
        layers = [] if self.lora is None else self.lora.layers()
        for layer in layers:
            present |= {layer.name_of(part): tensor for part, tensor in layer.parts.items()}
        odd = [f"{name} is gone" for name in self._forms if name not in present]
        for name, tensor in present.items():
            if name not in self._forms:
                # The engines know only the buffers of the first question; later ones are useless to them.
                odd += [f"{name} has come"] if isinstance(tensor, nn.Parameter) else []
            elif (form := self._form(tensor)) != self._forms[name]:
                before = self._forms[name]
                odd.append(f"{name} is {form[1]} of shape {form[0]}, and was {before[1]} of {before[0]}")
        if odd:
            raise ValueError(
                f"the model has changed since its engines were started [GRPO-507]: {some(odd)}; change it before the "
                "trainer is made"
            )
        if moved := [name for name, tensor in self._tensors.items() if present[name] is not tensor]:
            self._tensors = {name: present[name] for name in self._tensors}
            self._plans.clear()
            self.send_again(self._held.names.intersection(moved))
        self._adapter_of = {layer.weight: layer for layer in layers if layer.weight in self._adapter_of}
        for layer in layers:  # their scales may have changed
            self._scales |= {name: layer.scale for name in map(layer.name_of, layer.parts) if name in self._scales}

    def _form(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(whole_shape(tensor)), self._dtype_of(tensor)

    def _refuse_unplaced(self) -> None:
        lost = [
            meta.name
            for unit in self._described
            for meta in unit.metas
            if meta.name in self._unplaced
            and any(self._tensors[name].requires_grad and name not in self._may_lack for name in unit.names)
        ]
        if lost:
            raise ValueError(
                f"the engines have no place for what is trained in {some(lost)} [GRPO-505]: vLLM's class of this model "
                "passes over these names, and would sample without what they learn; freeze them (requires_grad_(False))"
            )

    def _frozen(self) -> frozenset[str]:
        with self._plain_model():
            return frozen_names(self.model, changing=self._adapter_of.keys()).intersection(self._tensors)

    def _plain_model(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.lora is None else self.lora.unwrapped()

    @property
    def has_adapters(self) -> bool:
        """True if adapters are sent alone."""
        return bool(self._adapters)

    def _units_of(self, layer: "LayerAdapter") -> list[Unit]:
        """Units of an adapter's matrices when sent alone."""
        units = []
        for part, tensor in layer.parts.items():
            name = layer.name_of(part)
            self._tensors[name] = tensor
            meta = ParamMeta(name, self._dtype_of(tensor), tuple(whole_shape(tensor)))
            units.append(Unit(names=(name,), metas=(meta,), as_it_is=True))
            if part.startswith("lora_B"):
                self._scales[name] = layer.scale
        return units

    def _merge(self, layers: Sequence["LayerAdapter"]) -> None:
        """Send each adapter with the weight it changes."""
        self._adapter_of = {layer.weight: layer for layer in layers}
        lonely = {*self._adapter_of}
        for index, unit in enumerate(self._described):
            if (layer := self._adapter_of.get(unit.names[0])) is None:
                continue
            lonely.remove(layer.weight)
            parts = {layer.name_of(part): tensor for part, tensor in layer.parts.items()}
            self._tensors |= parts
            self._described[index] = replace(unit, names=(*unit.names, *parts), as_it_is=False)
        if lonely:
            raise ValueError(f"adapters of {some(sorted(lonely))} have no weight of their own to be merged into")

    def _bucket(self, units: Sequence[Unit]) -> Bucket:
        return Bucket(
            parameters=tuple((name, self._tensors[name]) for unit in units for name in unit.names),
            metas=aligned([meta for unit in units for meta in unit.metas]),
        )

    def _to_checkpoint(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, tensors)

    # -- gathering -----------------------------------------------------------------------------------------------

    def meet(self, *, receives: bool) -> None:
        """Set up the gather, once, before the first `fill`; collective under ZeRO-3.

        Args:
            receives: this rank will need gathered tensors at some time.
        """
        sharded = [tensor for tensor in self._tensors.values() if is_zero3(tensor)]
        if sharded and self._gather is None:
            self._gather = ShardGather(sharded[0].ds_process_group, dtype=self.wire_dtype, receives=receives)

    def end_sync(self) -> None:
        """Release the memory of a weight sync, after its last `fill` or the failed one; on every rank."""
        if self._gather is not None:
            self._gather.release()

    @torch.no_grad()
    def fill(self, bucket: Bucket, places: Sequence[torch.Tensor] | None) -> None:
        """Gather a bucket, and write it to `places`. Collective under ZeRO-3.

        Args:
            places: a contiguous tensor of the same dtype and shape for each of `bucket.metas`, on any device; None to
                take part without output. On CUDA the copies are queued on the current stream.
        """
        wholes = None if places is None else self._wholes(bucket, places)
        plain: list[str] = []
        left: list[str] = []
        for name, tensor in bucket.parameters:
            is_plain = self._gather is not None and is_zero3(tensor) and has_plain_shards(tensor, self._gather.group)
            (plain if is_plain and self._travel_dtypes[name] == self.wire_dtype else left).append(name)
        if self._gather is not None and plain:
            flat = None if wholes is None else [wholes[name].view(-1) for name in plain]
            self._gather.gather([self._tensors[name] for name in plain], flat)
        with gathered([self._tensors[name] for name in left]):
            if wholes is not None:
                for name in left:
                    if is_four_bit(tensor := self._tensors[name]):
                        dequantise(tensor, wholes[name])
                    else:
                        wholes[name].copy_(tensor)
        if wholes is not None and places is not None:
            self._convert(bucket, wholes, places)

    def _wholes(self, bucket: Bucket, places: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Output tensor of each gather: its place, or temporary memory if it is converted afterwards."""
        by_name = {meta.name: place for meta, place in zip(bucket.metas, places, strict=True)}
        return {
            name: by_name[name]
            if name in self._as_they_are
            else torch.empty(whole_shape(tensor), dtype=self._travel_dtypes[name], device=tensor.device)
            for name, tensor in bucket.parameters
        }

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self.wire_dtype if tensor.is_floating_point() or is_four_bit(tensor) else tensor.dtype

    def _convert(self, bucket: Bucket, wholes: dict[str, torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        to_convert = {name: whole for name, whole in wholes.items() if name not in self._as_they_are}
        for weight in self._adapter_of.keys() & wholes.keys():
            layer = self._adapter_of[weight]
            parts = {part: to_convert.pop(layer.name_of(part)) for part in layer.parts}
            to_convert[weight] = layer.merged(wholes[weight], parts)
        converted = self._to_checkpoint(to_convert) if to_convert else {}
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name in converted:
                place.copy_(converted[meta.name])
            if (scale := self._scales.get(meta.name)) is not None:
                place.mul_(scale)


def _travelling(model: nn.Module, left_out: Collection[str]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, in the modules' order; a tied parameter appears once."""
    names = [
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules()
        for leaf in (*module._parameters, *module._buffers)
    ]
    tensors = dict(model.named_parameters()) | persistent_buffers(model)
    return {name: tensors[name] for name in names if name in tensors and name not in left_out}
