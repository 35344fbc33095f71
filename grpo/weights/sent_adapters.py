"""The adapters that a node's engines were sent and completions still need: kept for engines that come back."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from grpo.weights.buckets import Bucket
from grpo.weights.names import ADAPTER_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAdapter:
    """One adapter as it has travelled."""

    policy_version: int
    tensors: dict[str, torch.Tensor]
    """By PEFT's names, B with its scale; in host memory."""


class SentAdapters:
    """Keeps one adapter for each batch that is under way, and the newest. On a local main."""

    def __init__(self) -> None:
        self._coming: dict[str, torch.Tensor] = {}
        self._kept: dict[int, SentAdapter] = {}

    def begin(self) -> None:
        """Before a weight sync; what a broken one has noted is forgotten."""
        self._coming = {}

    def note(self, bucket: Bucket, places: Sequence[torch.Tensor]) -> None:
        """Copy what a filled bucket brings of adapters.

        Args:
            places: of each of `bucket.metas`.
        """
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name.startswith(ADAPTER_PREFIX):
                self._coming[meta.name] = place.to("cpu", copy=True)

    def keep(self, number: int, policy_version: int, in_use: Collection[int]) -> None:
        """Give what was noted its number, once the engines have it; of the others those in use stay."""
        self._kept = {each: adapter for each, adapter in self._kept.items() if each in in_use}
        self._kept[number] = SentAdapter(policy_version=policy_version, tensors=self._coming)
        self._coming = {}

    def older(self) -> dict[int, SentAdapter]:
        """All but the newest, by number."""
        return {number: adapter for number, adapter in self._kept.items() if number != max(self._kept)}
