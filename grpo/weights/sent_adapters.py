"""Adapters sent to a node's engines and still needed by completions: kept for restarted engines."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from grpo.weights.buckets import Bucket
from grpo.weights.names import ADAPTER_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAdapter:
    """One adapter as it was sent."""

    policy_version: int
    tensors: dict[str, torch.Tensor]
    """Tensors by PEFT's names, B multiplied by its scale; in host memory."""


class SentAdapters:
    """Keeps one adapter for each batch in progress, and the newest. On a local main."""

    def __init__(self) -> None:
        self._coming: dict[str, torch.Tensor] = {}
        self._kept: dict[int, SentAdapter] = {}

    def begin(self) -> None:
        """Begin a weight sync; drops the tensors of a broken one."""
        self._coming = {}

    def note(self, bucket: Bucket, places: Sequence[torch.Tensor]) -> None:
        """Copy the adapter tensors of a filled bucket.

        Args:
            places: of each of `bucket.metas`.
        """
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name.startswith(ADAPTER_PREFIX):
                self._coming[meta.name] = place.to("cpu", copy=True)

    def keep(self, number: int, policy_version: int, in_use: Collection[int]) -> None:
        """Store the noted tensors under their number, once the engines have them; of the others keep those in use."""
        self._kept = {each: adapter for each, adapter in self._kept.items() if each in in_use}
        self._kept[number] = SentAdapter(policy_version=policy_version, tensors=self._coming)
        self._coming = {}

    def older(self) -> dict[int, SentAdapter]:
        """Return all but the newest, by number."""
        return {number: adapter for number, adapter in self._kept.items() if number != max(self._kept)}
