"""Frozen parameters held by the engines, and detection of later writes to them."""

from collections.abc import Collection, Mapping

import torch

from grpo.weights.gather import is_zero3
from grpo.weights.page_sums import fetched, page_sum


class HeldParameters:
    """Held parameters of one rank, by name. Remembers this rank's part of each: the parameter, or its shard under
    ZeRO-3.

    Torch counts writes (`Tensor._version`), except those through `.data`; checksums detect these too.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self._sums: dict[str, int] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._seen)

    def hold(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Record that the engines hold exactly these parameters, in their present state."""
        own = {name: _own_part(parameter) for name, parameter in parameters.items()}
        self._sums = {name: value for name, value in self._sums.items() if name in own and name in self._seen}
        self._sums |= _sums_of({name: part for name, part in own.items() if name not in self._sums})
        self._seen = {name: self._seen.get(name, (part, part._version)) for name, part in own.items()}

    def forget(self, names: Collection[str] | None = None) -> None:
        """Record that the engines need these again; None: all."""
        for name in [*self._seen] if names is None else names:
            self._seen.pop(name, None)
            self._sums.pop(name, None)

    def written(self, *, by_sums: bool) -> list[str]:
        """Names of parameters modified on this rank.

        Args:
            by_sums: compare checksums too, which reads all of this rank's parts.
        """
        found = {name for name, (part, version) in self._seen.items() if part._version != version}
        if by_sums:
            sums = _sums_of({name: part for name, (part, _) in self._seen.items() if name not in found})
            found |= {name for name, value in sums.items() if value != self._sums[name]}
        return sorted(found)


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.ds_tensor if is_zero3(parameter) else parameter


def _sums_of(parts: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return fetched({name: page_sum(part.contiguous()) for name, part in parts.items() if not part.is_meta})
