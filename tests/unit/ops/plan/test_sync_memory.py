"""What a rank's GPU holds of 7B, 32B and 70B in each phase, worked out by hand."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from grpo.ops.plan.memory_budget import GIB, Held
from grpo.ops.plan.model_shape import shape_of
from grpo.ops.plan.sync_memory import WeightSyncShape, sync_lines, sync_shape
from grpo.ops.plan.training_memory import MicroBatch, training_budget
from grpo.ops.plan.zero_memory import Sharding, read_sharding
from tests.support.tiny_models import tiny_config

RANKS = 28  # 4 nodes of 8 GPUs, one reserved on each
SEQUENCES, TOKENS, COMPLETION_TOKENS = 4, 1536, 1024


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """A model without tied weights, in bfloat16, whose sizes stand on its page."""

    family: str
    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    has_biases: bool
    parameters: int
    sync_gib: tuple[float, float]
    """What a weight sync adds, on a local main and on another rank."""

    @property
    def config(self) -> PretrainedConfig:
        return CONFIG_MAPPING[self.family](
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=False,
        )

    def held_gib(self) -> dict[str, tuple[float, float]]:
        """(local main, other ranks) by phase."""
        kv = self.kv_heads * self.hidden // self.heads
        attention = 2 * self.hidden**2 + 2 * self.hidden * kv
        small = 2 * self.hidden + (self.hidden + 2 * kv if self.has_biases else 0)  # norms and biases
        layer = attention + 3 * self.hidden * self.mlp + small
        embedding = self.vocab * self.hidden
        assert self.layers * layer + 2 * embedding + self.hidden == self.parameters
        # 16 bytes of a parameter: weight 2, gradient 2, float32 weight 4, two moments 8; the gradient bucket of
        # 500 M elements; what is small stays whole; 2 GiB are CUDA's.
        always = 16 * self.parameters / RANKS + 2 * 500e6 + 2 * (self.layers * small + self.hidden) + 2 * GIB
        # Gathered: a billion parameters, max_live_parameters. Each layer's input. The head's gradient.
        tokens = SEQUENCES * TOKENS
        backward = 2 * 1e9 + tokens * 2 * self.layers * self.hidden + 2 * embedding
        # Beside it the larger of two: at the head a tile of logits, the scored hidden states with their gradient in
        # float32 and bfloat16, and the head's in float32 ...
        head = 4096 * 32768 * 2 + SEQUENCES * COMPLETION_TOKENS * self.hidden * (2 + 4 + 2) + 4 * embedding
        # ... and at a layer what it keeps (two norms of 8 bytes; queries, result, keys and values, and a float32 per
        # head; four factors in the MLP), two more gradients of such factors, and the gradients that are reduced.
        kept = 2 * 8 * self.hidden + 2 * (2 * self.hidden + 2 * kv) + 4 * self.heads + 2 * 4 * self.mlp
        a_layer = tokens * (kept + 2 * 2 * self.mlp) + 2 * max(500e6, embedding)
        # A sub-group's gradients, in float32 and as they come.
        step = min(1e9, self.parameters / RANKS) * (4 + 2)
        # The largest bucket is the embedding. Every rank has all of it, and a cast copy of its own shard; the local
        # main three packed buffers of that size.
        gathered, packed = 2 * embedding * (1 + 1 / RANKS), 3 * 2 * embedding
        assert 2 * embedding > 512 * 2**20, "the limit of a bucket would count"
        return {
            phase: (local_main / GIB, other / GIB)
            for phase, local_main, other in (
                ("always", always, always),
                ("forward and backward", *(2 * [always + backward + max(head, a_layer)])),
                ("optimizer step", always + step, always + step),
                ("sync", always + gathered + packed, always + gathered),
            )
        }


MODELS = {
    # 2 x 152064 x 3584 B = 1.015 GiB: (1 + 1/28) x 1.015 = 1.05, and 3 x 1.015 more on a local main
    "Qwen2.5-7B": ByHand(
        family="qwen2",
        vocab=152064,
        hidden=3584,
        mlp=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        has_biases=True,
        parameters=7_615_616_512,
        sync_gib=(4.10, 1.05),
    ),
    # 2 x 152064 x 5120 B = 1.450 GiB
    "Qwen2.5-32B": ByHand(
        family="qwen2",
        vocab=152064,
        hidden=5120,
        mlp=27648,
        layers=64,
        heads=40,
        kv_heads=8,
        has_biases=True,
        parameters=32_763_876_352,
        sync_gib=(5.85, 1.50),
    ),
    # 2 x 128256 x 8192 B = 1.957 GiB
    "Llama-3-70B": ByHand(
        family="llama",
        vocab=128256,
        hidden=8192,
        mlp=28672,
        layers=80,
        heads=64,
        kv_heads=8,
        has_biases=False,
        parameters=70_553_706_496,
        sync_gib=(7.90, 2.03),
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_training_budget_of_known_models_matches_hand_calculation(model: ByHand) -> None:
    sync = sync_shape(model.config, dtype=torch.bfloat16, bucket_bytes=512 * 2**20)
    sharding = read_sharding({"stage": 3}, hidden_size=model.hidden, world_size=RANKS, dtype_bytes=2)
    batch = MicroBatch(
        sequences=SEQUENCES,
        sequence_tokens=TOKENS,
        completion_tokens=COMPLETION_TOKENS,
        dtype_bytes=2,
        checkpointing=True,
        flash_attention=True,
    )
    nccl = sync_lines(sync, sharding, backend="nccl", has_gpus=True, gathers_on_device=True)
    budget = training_budget(shape_of(model.config, "known"), sharding, batch, sync=nccl, gpu_bytes=80 * GIB)
    by_hand = model.held_gib()
    for held in budget.held:
        planned = held.local_main_bytes / GIB, held.other_ranks_bytes / GIB
        print(f"{held.phase}: planned {planned} GiB, by hand {by_hand[held.phase]} GiB")
        assert planned == pytest.approx(by_hand[held.phase], rel=0.01), held.phase
    assert added(budget.held) == pytest.approx(model.sync_gib, abs=0.01)


def added(held: tuple[Held, ...]) -> tuple[float, float]:
    """GiB that a weight sync adds to what is always held, on a local main and on another rank."""
    always, sync = held[0], held[-1]
    assert (always.phase, sync.phase) == ("always", "sync")
    return (
        (sync.local_main_bytes - always.local_main_bytes) / GIB,
        (sync.other_ranks_bytes - always.other_ranks_bytes) / GIB,
    )


def lines_of(
    sync: WeightSyncShape, *, ranks: int = 4, stage: Literal[2, 3] = 3, **changed: Any
) -> dict[str, tuple[str, int]]:
    usual = {"backend": "nccl", "has_gpus": True, "gathers_on_device": True}
    sharding = Sharding(stage=stage, world_size=ranks, dtype_bytes=2)
    lines = sync_lines(sync, sharding, **(usual | changed))  # type: ignore[arg-type]
    assert {line.phase for line in lines} <= {"sync"}
    return {line.key: (line.holder, line.num_bytes) for line in lines}


def test_sync_lines_match_holder_and_bytes_by_backend() -> None:
    # two bytes; four ranks pad 10 and 7 to 3 and 2 each: the first bucket is the largest, 20 elements with its padding
    sync = WeightSyncShape(
        buffer_bytes=64, buckets=((10, 7), (16,)), converted_bytes=0, dtype_bytes=2, first_bytes=66, later_bytes=66
    )
    packed = ("local main", 2 * 64)  # of three, as many as there are buckets
    assert lines_of(sync) == {"sync_gathered": ("every rank", 40 + 10), "sync_packed": packed}
    assert lines_of(sync, ranks=1) == {"sync_packed": packed}
    assert lines_of(sync, stage=2) == {"sync_packed": packed}
    assert lines_of(sync, gathers_on_device=False) == {"sync_packed": packed}  # gloo: through the host's memory
    assert lines_of(sync, backend="shm") == {"sync_gathered": ("every rank", 50)}  # packed in the host's memory
    cpu = {"backend": "shm", "has_gpus": False, "gathers_on_device": False}
    assert lines_of(sync, **cpu) == {"sync_gathered": ("local main", 30), "sync_sent": ("other ranks", 10)}


def test_sync_shape_with_split_experts_counts_conversion_on_local_main() -> None:
    config = tiny_config("qwen3-moe")
    at_once = sync_shape(config, dtype=torch.bfloat16, bucket_bytes=2**20)
    assert at_once.converted_bytes == 0
    sync = sync_shape(config, dtype=torch.bfloat16, bucket_bytes=2**20, whole_experts=False)
    assert sum(map(sum, sync.buckets)) == sum(map(sum, at_once.buckets)) == shape_of(config, "moe").num_parameters
    assert len(sync.buckets) == 1
    # 2 layers of 4 experts of 64: gate and up, down; as they are, and copied
    fused, down = 2 * 4 * 2 * 64 * 128, 2 * 4 * 64 * 128
    assert sync.converted_bytes == 2 * 2 * (fused + down)
    assert lines_of(sync)["sync_converted"] == ("local main", sync.converted_bytes)
    assert sync_shape(tiny_config("phi3-fused"), dtype=torch.bfloat16, bucket_bytes=2**20).converted_bytes == 0
