"""Conversion units: the model's tensors that become checkpoint tensors together, and those sent unchanged."""

import functools
from dataclasses import dataclass, replace

import torch

from grpo.weights.buckets import ParamMeta
from grpo.weights.names import Conversion, Tensors, conversion_units
from grpo.weights.wire_format import StackedExperts, WireFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Tensors of the model that become checkpoint tensors together; usually one."""

    names: tuple[str, ...]
    metas: tuple[ParamMeta, ...]
    as_it_is: bool
    """One tensor under its own name, unchanged."""
    experts: StackedExperts | None = None
    """Description, if it is all experts of one projection."""


def described_units(convert: Conversion, placeholders: Tensors) -> list[Unit]:
    """Find the smallest sets of tensors that become checkpoint tensors together.

    Args:
        convert: conversion of `save_pretrained`.
        placeholders: all tensors of the model, on the meta device, in the dtype they are sent in.
    """
    units = []
    for names in conversion_units(convert, placeholders):
        tensors = convert({name: placeholders[name] for name in names})
        experts = _stacked(convert, names[0], placeholders[names[0]], len(tensors)) if len(names) == 1 else None
        units.append(
            Unit(
                names=tuple(names),
                metas=tuple(ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()),
                as_it_is=len(names) == 1 and tensors.get(names[0]) is placeholders[names[0]],
                experts=experts,
            )
        )
    return units


def _stacked(convert: Conversion, name: str, placeholder: torch.Tensor, num_outputs: int) -> StackedExperts | None:
    """Return the stack if `num_outputs` checkpoint tensors are equal parts of each expert's rows, unchanged; else None.

    Tested by converting a small tensor with a different number in every place.
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
    for output, tensor in convert({name: numbers}).items():
        place = wanted.get(tuple(tensor.flatten().tolist()))
        if place is None or tensor.shape != (2, 3):
            return None
        names[place] = output
    if len(names) != num_outputs:
        return None
    parts = tuple(tuple(names[part, expert] for expert in range(experts)) for part in range(num_parts))
    return StackedExperts(name=name, shape=tuple(placeholder.shape), parts=parts)


def in_format(unit: Unit, wire_format: WireFormat) -> Unit:
    dtypes = {name: getattr(torch, dtype) for name, dtype in wire_format.dtypes.items()}
    metas = tuple(replace(meta, dtype=dtypes.get(meta.name, meta.dtype)) for meta in unit.metas)
    stack = unit.experts
    if stack is None or stack.name not in wire_format.whole_experts:
        return replace(unit, metas=metas)
    assert len({meta.dtype for meta in metas}) == 1, f"{stack.name}: experts of one layer in several dtypes"
    whole = ParamMeta(stack.name, metas[0].dtype, stack.shape)
    return replace(unit, metas=(whole,), as_it_is=True)


def common_dtype(unit: Unit) -> torch.dtype:
    """Dtype in which the tensors of a unit are collected before conversion."""
    return functools.reduce(torch.promote_types, (meta.dtype for meta in unit.metas))
