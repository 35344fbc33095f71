"""The adapters with which a node's engines still sample, in host memory: one that comes back needs them, too."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo.weights.buckets import Bucket
from grpo.weights.names import ADAPTER_PREFIX


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentAdapter:
    """One adapter as it has travelled."""

    number: int
    policy_version: str
    tensors: Mapping[str, torch.Tensor]
    """By the names under which they travel; B with its scale."""


class SentAdapters:
    """Keeps what pushes have brought, of a local main."""

    def __init__(self) -> None:
        self.kept: dict[int, SentAdapter] = {}
        """By number, without the newest."""
        self._newest: SentAdapter | None = None
        self._coming: dict[str, torch.Tensor] = {}

    def note(self, bucket: Bucket, places: Sequence[torch.Tensor]) -> None:
        """A bucket is filled; what of adapters is in it belongs to the push that is under way."""
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name.startswith(ADAPTER_PREFIX):
                self._coming[meta.name] = place.to("cpu", copy=True)

    def begin(self) -> None:
        """Another push is under way."""
        self._coming = {}

    def take(self, number: int, policy_version: str, *, in_use: Collection[int]) -> None:
        """The push has arrived; of earlier ones those stay with which completions are still sampled."""
        if self._newest is not None:
            self.kept[self._newest.number] = self._newest
        self.kept = {kept: sent for kept, sent in self.kept.items() if kept in in_use}
        self._newest = SentAdapter(number=number, policy_version=policy_version, tensors=self._coming)
        self._coming = {}
