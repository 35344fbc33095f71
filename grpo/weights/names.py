"""Units of a conversion: transformers' parameters that become one or several checkpoint tensors together."""

from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
Conversion = Callable[[Tensors], Tensors]

ADAPTER_PREFIX = "base_model.model."
"""Prefix of the base's layer names, in PEFT's files and in weight syncs."""


def conversion_units(convert: Conversion, placeholders: Tensors) -> list[list[str]]:
    """Cut parameters into the smallest sets that can be converted independently.

    Args:
        placeholders: every parameter, on the meta device.

    Raises:
        ValueError: converting the sets one by one differs from converting all at once.
    """
    unit_of: dict[str, list[str]] = {}  # by output name
    units: list[list[str]] = []
    for name, placeholder in placeholders.items():
        outputs = list(convert({name: placeholder}))
        unit = next((unit_of[output] for output in outputs if output in unit_of), None)
        if unit is None:
            units.append(unit := [])
        unit.append(name)
        unit_of |= dict.fromkeys(outputs, unit)
    in_units = {n: t.shape for unit in units for n, t in convert({part: placeholders[part] for part in unit}).items()}
    at_once = {n: t.shape for n, t in convert(dict(placeholders)).items()}
    if in_units != at_once:
        odd = sorted(name for name in at_once.keys() | in_units.keys() if at_once.get(name) != in_units.get(name))
        raise ValueError(f"this model's weights cannot be converted one by one: {some(odd)} depend on others")
    return units


def some(names: list[str]) -> str:
    """Join the first of many names, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
