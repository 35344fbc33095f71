"""What one rank of `bench.weight_sync` measures with LoRA: adapters alone, the whole model, and TRL's merging of it."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bench.report import interleave
from bench.weight_sync_ranks import WIRE_DTYPE, Ranks, dense_model, start_engine, under_zero3
from grpo.weights.adapters import Lora
from grpo.weights.buckets import meta_bytes
from grpo.weights.source import GatheredSource

RANK = 16


class LoraRanks(Ranks):
    """An engine of its own, with space for one adapter on all linear layers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.settings = dist.get_rank(), settings
        config = dense_model(settings)
        space = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
        folder = Path(settings["folder"]) / "lora"
        self.client = start_engine(settings, folder, config, **space) if self.rank == 0 else None
        with under_zero3():
            base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings["shards"]))
            self.model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
        lora = Lora(self.model, merges=False)
        bucket_bytes = settings["bucket_mb"] * 2**20
        self._meet(GatheredSource(lora.base, wire_dtype=WIRE_DTYPE, bucket_bytes=bucket_bytes, lora=lora))

    def whole_sync(self) -> float:
        """The base too, as to an engine that has just started."""
        self.source.forget_sent()
        return self.own_sync()

    def checked_sync(self) -> float:
        """Adapters, and the frozen base held against what it was."""
        begun = time.perf_counter()
        assert not self.source.written(by_sums=True)
        return time.perf_counter() - begun + self.own_sync(checks_bits=True)

    def trl_sync(self) -> float:
        """TRL's server mode."""
        adapters, self.source._adapters = self.source._adapters, []  # the engine goes on with the one that it has
        try:
            return self.trl.packed_stream()
        finally:
            self.source._adapters = adapters

    def measure(self) -> dict[str, Any]:
        self.syncer.connect()
        self.own_sync()
        adapter_bytes = sum(p.ds_numel for p in self.model.parameters() if p.requires_grad) * WIRE_DTYPE.itemsize
        self.trl.held = [meta.name for meta in self.source.plan().metas]
        synced_bytes = sum(map(meta_bytes, self.source.plan().metas))
        two_chunks = 2 * self.trl.chunk_bytes if self.client else 0
        grown = {
            "adapters alone": self.growth(self.own_sync),
            "base and adapters": self.growth(self.whole_sync),
            "TRL merges and sends": self.growth(self.trl_sync) + two_chunks,  # its packed buffers, ours here
        }
        variants = {
            "adapters alone": self.own_sync,
            "adapters alone, bits checked": self.checked_sync,
            "base and adapters": self.whole_sync,
            "TRL merges and sends": self.trl_sync,
        }
        return {
            "seconds": interleave(variants, self.settings["repetitions"]),
            "grown_bytes": grown,
            "adapter_bytes": adapter_bytes,
            "synced_bytes": synced_bytes,
        }
