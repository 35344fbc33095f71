"""The engine's side of a weight sync: vLLM's weight-transfer engines, extended to count arrivals before the reload is
finalised.

Runs in vLLM's worker processes; imports neither TRL nor DeepSpeed.
"""

import contextlib
import functools
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info

from grpo.weights.adapter_slot import is_adapters, take_adapter, without_adapters
from grpo.weights.completeness import (
    ChangedBitsError,
    IncompleteSyncError,
    incomplete_layers,
    shown,
    unreached_tensors,
    unsent_names,
)
from grpo.weights.destinations import (
    Destination,
    Loader,
    WholeLoad,
    arrivals_of,
    destinations,
    held_dtypes,
    loaded_weight,
    loaders_replaced,
    whole_loads,
)
from grpo.weights.packed_on_cpu import refresh_packed_weights
from grpo.weights.page_sums import ArrivedSums
from grpo.weights.wire_format import WireFormat

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence vLLM's warnings about layers that received nothing: here it is known which ones may."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class CountedReload(WeightTransferEngine):
    """Layer-wise reload with a completeness check at its end; mixed into both transports."""

    _known: frozenset[str] = frozenset()  # checkpoint names received in finished weight syncs
    _reached: frozenset[str] = frozenset()  # paths of the engine's tensors filled in finished weight syncs
    _places: Sequence[Destination] = ()  # during a weight sync: all tensors it may fill
    _whole_experts: Mapping[str, list[WholeLoad]] = MappingProxyType({})  # by their name in the weight sync
    # checkpoint names of the tensors that fill a layer, by its path
    _sources: Mapping[str, set[str]] = MappingProxyType({})
    _parts: Mapping[str, list[str]] = MappingProxyType({})  # by the same name, those in the checkpoint

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def wire_format(self, question: dict[str, Any]) -> WireFormat:
        """Answer the trainer before the first weight sync: this engine's dtypes, experts it can load at once, and names
        without a place.

        Runs a dry run of a reload: nothing is loaded, and the previous tensors are restored.

        Args:
            question: from `GatheredSource.question`.

        Raises:
            ValueError, KeyError: vLLM's, for a parameter name unknown to the model.
        """
        asked, buffers = question["metas"], {*question["buffers"]}
        weights = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, dtype, shape in zip(asked["names"], asked["dtype_names"], asked["shapes"], strict=True)
        }
        with without_adapters(self.model):
            initialize_layerwise_reload(self.model)
            try:
                arrivals, self._sources = arrivals_of(self.model, weights, buffers)
                held = held_dtypes(arrivals, weights)
                loads = {each["name"]: whole_loads(each["parts"], arrivals) for each in question["experts"]}
            finally:
                with _without_warnings():
                    finalize_layerwise_reload(self.model, self.model_config)
        reached = {*itertools.chain(*self._sources.values())}
        self._whole_experts = {name: each for name, each in loads.items() if each is not None}
        self._parts = {each["name"]: list(itertools.chain(*each["parts"])) for each in question["experts"]}
        return WireFormat(
            dtypes={name: str(dtype).removeprefix("torch.") for name, dtype in held.items()},
            whole_experts=tuple(self._whole_experts),
            computed=tuple(name for name in question["buffers"] if name not in reached),
            unplaced=tuple(name for name in weights if name not in reached and name not in buffers),
        )

    def start_weight_update(self) -> None:
        self._received: set[str] = set()
        self._held: set[str] = set()
        self._filled: set[str] = set()  # paths of the engine's tensors
        self._adapter: dict[str, torch.Tensor] = {}
        self._reload = contextlib.ExitStack()
        self._reloads = False
        self._sums: ArrivedSums | None = None  # set while bits are checked

    def _begin_reload(self) -> None:
        """Begin the reload with the first weight: a weight sync of adapters alone touches no layer."""
        self._reloads = True
        self._reload.enter_context(without_adapters(self.model))
        initialize_layerwise_reload(self.model)
        self._places = destinations(self.model)
        self._reload.enter_context(loaders_replaced(self.model, self._watch))

    def _watch(self, destination: Destination, loader: Loader) -> Loader:
        path, held = destination.path, destination.tensor.dtype

        @functools.wraps(loader)
        def watched(*args: Any, **kwargs: Any) -> Any:
            sent = loaded_weight(args, kwargs).dtype
            if sent != held and sent.is_floating_point and held.is_floating_point:
                raise IncompleteSyncError(f"{path} was sent in {sent}, but this engine holds it in {held}")
            self._filled.add(path)
            return loader(*args, **kwargs)

        original = _get_original_loader(destination.tensor)
        # vLLM's own loader keeps its input until a layer is complete, and then unwraps this one
        if original is not loader:
            watched.__wrapped__ = self._summed(original)
        return watched

    def _summed(self, loader: Loader) -> Loader:
        """Wrap a loader to checksum its input before loading."""

        @functools.wraps(loader)
        def summed(*args: Any, **kwargs: Any) -> Any:
            if self._sums is not None:
                self._sums.load(loaded_weight(args, kwargs))
            return loader(*args, **kwargs)

        return summed

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load one update: stacked experts part by part, all else by the model's own `load_weights`.

        Adapters are kept for `take_adapter`.
        """
        if self._sums is not None:
            for name, weight in weights:
                self._sums.arrive(name, weight)
        self._adapter |= {name: weight.clone() for name, weight in weights if is_adapters(name)}
        weights = [(name, weight) for name, weight in weights if not is_adapters(name)]
        if weights and not self._reloads:
            self._begin_reload()
        for name, weight in weights:
            if loads := self._whole_experts.get(name):
                for each, part in zip(loads, weight.chunk(len(loads), dim=1), strict=True):
                    each.load(part)
        others = [(name, weight) for name, weight in weights if name not in self._whole_experts]
        if others:
            with disable_mtp_completeness_check():
                self.model.load_weights(others)

    def finish_weight_update(self) -> None:
        """Complete the reload.

        Raises:
            IncompleteSyncError: a layer did not receive all of its elements, or a tensor was never filled by a weight
                sync; names the layers and the missing parts.
        """
        received = {name for name in self._received if not is_adapters(name)}
        reached = self._reached | self._filled
        lines = self._incomplete(received, reached) if self._reloads else []
        lines += unsent_names(known=self._known, received=self._received, held=self._held)
        if lines:
            raise IncompleteSyncError(
                f"the weight sync is incomplete in {len(lines)} places [GRPO-503]: {shown(lines)}"
            )
        if self._reloads:
            self._finish_reload()
        self._known |= self._received
        self._reached = reached
        _log.debug(
            "the weight sync is complete: %d parameters came, %d tensors are filled", len(received), len(reached)
        )

    def _incomplete(self, received: set[str], reached: Collection[str]) -> list[str]:
        before = bool(self._known)
        lines = incomplete_layers(
            self.model, tied=self._tied, received=received, synced_before=before, sources=self._sources
        )
        layers = {line.partition(": ")[0] for line in lines}  # not repeated tensor by tensor
        for line in unreached_tensors(self._places, tied=self._tied, filled=self._filled, reached=reached):
            if line.partition(": ")[0].rpartition(".")[0] not in layers:
                lines.append(line)
        return lines

    def _finish_reload(self) -> None:
        reloaded = {
            layer
            for layer in self.model.modules()
            if not get_layerwise_info(layer).can_load() or get_layerwise_info(layer).load_numel > 0
        }
        with _without_warnings():
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            refresh_packed_weights(self.model, reloaded)
        self._places = ()
        self._reload.close()

    def check_bits(self, sent: Mapping[str, int]) -> None:
        """Compare the received bits with the sent ones, once everything is loaded.

        Args:
            sent: the trainer's sums (`page_sum`), by the names in the weight sync.

        Raises:
            ChangedBitsError: they differ; names the tensors.
        """
        assert self._sums is not None, "check_bits after a weight sync that did not ask for sums"
        if lines := self._sums.changed(sent):
            raise ChangedBitsError(f"the weight sync changed {len(lines)} tensors [GRPO-506]: {shown(lines)}")

    def take_adapter(self, lora_manager: Any, number: int, keep: Collection[int]) -> None:
        """Hold the adapter from the last weight sync, and those in `keep`."""
        take_adapter(lora_manager, number, self._adapter, self.device, keep)
        self._adapter = {}

    def note_received(self, names: list[str], held: list[str], *, sums_bits: bool = False) -> None:
        """Record the names in one update. Refuses duplicates, which would make an incomplete layer count as full."""
        if sums_bits and self._sums is None:
            self._sums = ArrivedSums()
        for name in names:
            parts = self._parts.get(name, [name])
            if not self._received.isdisjoint(parts):
                raise IncompleteSyncError(f"the weight sync sends {name} twice")
            self._received.update(parts)
        self._held.update(part for name in held for part in self._parts.get(name, [name]))
