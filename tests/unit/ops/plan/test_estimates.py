"""The formulae of `grpo plan`: parameters, ZeRO states, activations, KV cache, weight sync, by hand and against
autograd."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.ops.plan.batch import plan_batch
from grpo.ops.plan.engine_memory import default_max_num_seqs, engine_memory
from grpo.ops.plan.memory_budget import GIB, BudgetLine, Holder, Phase, make_budget, readable
from grpo.ops.plan.model_shape import ModelShape, shape_of
from grpo.ops.plan.training_memory import (
    activation_lines,
    at_the_worst_moment,
    head_lines,
    saved_bytes_per_token,
)
from grpo.ops.plan.zero_memory import Sharding, read_sharding, states_of, step_lines
from tests.support.activations import micro_batch, saved_by_autograd
from tests.support.tiny_models import FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_of_counts_shared_parameters_once(family: str) -> None:
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config)
    unique = {id(parameter): parameter.numel() for parameter in model.parameters()}
    shape = shape_of(config, family)
    assert shape.num_parameters == sum(unique.values())
    assert (shape.trained.elements, shape.frozen.elements, shape.trains_head) == (shape.num_parameters, 0, True)
    assert sum(count for _, count in shape.trained.sizes) == len(unique)
    head = config.vocab_size * config.hidden_size
    buffers = {name for name, _ in model.named_buffers()}
    listed = sum(value.numel() for name, value in model.state_dict().items() if name not in buffers)
    assert listed - shape.num_parameters == (head if config.tie_word_embeddings else 0)
    for world_size in (1, 2, 7):
        held = [-(-size // world_size) for size in unique.values()]
        assert shape.trained.sharded(world_size) == sum(held)
    assert shape.num_layers == config.num_hidden_layers


def test_shape_of_fused_experts_counts_all_and_routed_share() -> None:
    shape = shape_of(tiny_config("qwen3-moe"), "moe")
    assert shape.trained.largest == 512 * 128  # the embedding, as large as all experts' gate and up: 4 x 2 x 64 x 128
    (layer,) = shape.layers
    assert layer.parameters > 4 * 3 * 64 * 128
    assert layer.mlp_elements == 2 * (4 * 64 + 2 * 128)  # two experts per token
    experts = shape.num_layers * 4 * 3 * 64 * 128
    assert (shape.expert_parameters, shape.routed_share) == (experts, 0.5)
    assert shape.parameters_read(1) == shape.num_parameters - experts / 2
    assert shape.parameters_read(3) == shape.num_parameters - experts / 8  # an eighth is met by none of three tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_per_token_matches_autograd(family: str, dtype: torch.dtype) -> None:
    sequences, tokens = 2, 128
    few, many = tiny_config(family), tiny_config(family)
    many.num_hidden_layers = 2 * few.num_hidden_layers
    if getattr(many, "layer_types", None):
        many.layer_types = few.layer_types * 2
    difference = saved_by_autograd(many, dtype, sequences, tokens) - saved_by_autograd(few, dtype, sequences, tokens)
    (layer,) = (shape := shape_of(few, family)).layers
    batch = micro_batch(sequences, tokens, dtype_bytes=dtype.itemsize, flash_attention=False)
    estimate = layer.count * saved_bytes_per_token(shape, layer, batch)
    assert estimate * sequences * tokens == pytest.approx(difference, rel=0.12)


def test_activation_lines_with_checkpointing_match_hand_calculation() -> None:
    shape = shape_of(tiny_config("llama-untied"), "llama")
    (layer,) = shape.layers
    batch = micro_batch(3, 100)
    one = saved_bytes_per_token(shape, layer, batch)
    # two norms of 128, queries and result of 128, keys and values of 64, four heads, an MLP of 256
    assert one == 8 * 2 * 128 + 2 * (2 * 128 + 2 * 64) + 4 * 4 + 2 * 4 * 256
    lines = activation_lines(shape, batch)
    by_key = {line.key: line for line in lines}
    assert by_key["activations_checkpointed"].num_bytes == 300 * 2 * 128 * 2
    assert by_key["recomputed_layer"].num_bytes == 300 * one
    assert by_key["layer_gradients"].num_bytes == 300 * 2 * 256 * 2  # two factors of an MLP of 256
    assert by_key["activations"].num_bytes == 300 * 2 * one
    assert [line.key for line in lines if not line.counted] == ["activations"]


def test_head_lines_match_hand_calculation() -> None:
    shape = shape_of(tiny_config("llama-untied"), "llama")
    gradient, logits = head_lines(shape, micro_batch(8, 1024))
    # tokens: bf16 hidden states, their float32 gradient and its bf16 copy; the head's gradient in float32
    assert logits.num_bytes == 4096 * 32768 * 2 + 8192 * 128 * (2 + 4 + 2) + 512 * 128 * 4
    assert gradient.num_bytes == 512 * 128 * 2
    gradient, logits = head_lines(shape, micro_batch(8, 1024, dtype_bytes=4))  # nothing is copied
    assert logits.num_bytes == 4096 * 32768 * 4 + 8192 * 128 * (4 + 4)
    assert gradient.num_bytes == 512 * 128 * 4


def test_worst_moment_counts_larger_of_head_and_layers() -> None:
    def line(key: str, num_bytes: int) -> BudgetLine:
        return BudgetLine(key, "", "forward and backward", num_bytes, "")

    layers = [line("recomputed_layer", 5), line("layer_gradients", 2), line("reduce_copy", 1)]
    for logits, counted in ((9, {"logits", "activations"}), (7, {"activations", *(each.key for each in layers)})):
        lines = at_the_worst_moment([line("activations", 1), line("logits", logits), *layers])
        assert {each.key for each in lines if each.counted} == counted


def test_make_budget_separates_local_main_from_other_ranks() -> None:
    def line(num_bytes: int, phase: Phase, holder: Holder = "every rank") -> BudgetLine:
        return BudgetLine("", "", phase, num_bytes, "", holder=holder)

    lines = [line(100, "always"), line(30, "optimizer step"), line(5, "sync"), line(40, "sync", "local main")]
    budget = make_budget([*lines, line(7, "sync", "other ranks")], None)
    assert [(held.phase, held.local_main_bytes, held.other_ranks_bytes) for held in budget.held] == [
        ("always", 100, 100),
        ("forward and backward", 100, 100),
        ("optimizer step", 130, 130),
        ("sync", 145, 112),
    ]
    assert (budget.peak_bytes, budget.peak_phase) == (145, "sync")


@pytest.mark.parametrize(
    ("zero", "dtype_bytes", "per_parameter"),
    [
        ({"stage": 3}, 2, 16 / 4),
        ({"stage": 3}, 4, 20 / 4),
        ({"stage": 2}, 2, 2 + 14 / 4),
        ({"stage": 1}, 2, 4 + 12 / 4),
        ({"stage": 0}, 2, 20),  # in float32, as it is loaded, with DDP's buckets
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, 2, 2 / 4),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, 2, 0),
    ],
)
def test_states_of_matches_zero_stage(zero: dict[str, Any], dtype_bytes: int, per_parameter: float) -> None:
    shape = shape_of(tiny_config("qwen3-tied"), "qwen3")
    states = states_of(shape, read_sharding(zero, hidden_size=128, world_size=4, dtype_bytes=dtype_bytes))
    assert states.device_bytes == pytest.approx(per_parameter * shape.num_parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "dtype_bytes", "per_parameter"),
    [(1, 2, 6 / 4 - 2 * 3 / 4), (2, 2, 6 / 4), (2, 4, 4 / 4), (3, 2, 6 / 4), (0, 2, 0)],
)
def test_step_lines_match_zero_stage(stage: int, dtype_bytes: int, per_parameter: float) -> None:
    """Flat and in float32 beside what they are made from; under ZeRO-1 the other ranks' three quarters are freed."""
    shape = shape_of(tiny_config("qwen3-tied"), "qwen3")
    sharding = read_sharding({"stage": stage}, hidden_size=128, world_size=4, dtype_bytes=dtype_bytes)
    num_bytes = sum(line.num_bytes for line in step_lines(shape, sharding))
    assert num_bytes == pytest.approx(per_parameter * shape.num_parameters, rel=1e-2)


@pytest.mark.parametrize(("loaded_bytes", "world_size", "each"), [(4, 1, 16), (4, 2, 20), (2, 1, 8), (2, 8, 10)])
def test_states_of_ddp_match_loaded_dtype_and_buckets(loaded_bytes: int, world_size: int, each: int) -> None:
    shape = shape_of(tiny_config("qwen3-tied"), "qwen3")
    sharding = Sharding(stage=0, world_size=world_size, dtype_bytes=2, loaded_bytes=loaded_bytes)
    assert states_of(shape, sharding).device_bytes == each * shape.num_parameters


def test_read_sharding_fills_auto_from_hidden_size() -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    }
    zero |= {"offload_optimizer": {"device": "auto"}, "stage3_max_live_parameters": "auto"}
    sharding = read_sharding(zero, hidden_size=128, world_size=1, dtype_bytes=2)
    assert (sharding.reduce_bucket_size, sharding.param_persistence_threshold) == (128**2, 1280)
    assert sharding.max_live_parameters == Sharding(stage=3, world_size=1, dtype_bytes=2).max_live_parameters
    assert (sharding.sub_group_size, sharding.offload_optimizer) == (10**9, "none")


def sequences_of(shape: ModelShape, size: int, tokens: int, **kwargs: Any) -> int:
    return engine_memory(
        shape,
        tensor_parallel_size=size,
        dtype_bytes=2,
        sequence_tokens=tokens,
        utilization=0.9,
        capacity_bytes=80 * GIB,
        engine_kwargs={"kv_cache_memory_bytes": 2**20, **kwargs},
    ).sequences_at_once


def test_default_max_num_seqs_matches_vllm() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    for workers in (1, 2):
        _, limits = EngineArgs.get_batch_defaults(workers)
        assert default_max_num_seqs(None, workers) == limits[UsageContext.LLM_CLASS]
    assert (default_max_num_seqs(80 * GIB, 1), default_max_num_seqs(40 * GIB, 2)) == (1024, 256)
    assert default_max_num_seqs(79 * GIB, 1, is_a100=True) == 256


def test_engine_memory_counts_kv_blocks_heads_and_windows() -> None:
    llama = shape_of(tiny_config("llama-untied"), "llama")  # 2 layers, 2 key-value heads of 32
    assert sequences_of(llama, 1, 100) == 2**20 // (112 * 2 * 2 * 2 * 32 * 2)  # 100 tokens take 7 blocks of 16
    assert sequences_of(llama, 2, 100) == 2**20 // (112 * 2 * 2 * 1 * 32 * 2)
    assert sequences_of(llama, 4, 100) == sequences_of(llama, 2, 100)  # heads are copied, not cut
    assert sequences_of(llama, 1, 100, kv_cache_dtype="fp8") == 2**20 // (112 * 2 * 2 * 2 * 32)
    config = tiny_config("gemma2-tied")  # one layer slides over 32 tokens, one remembers all
    config.sliding_window = 32
    assert sequences_of(shape_of(config, "gemma2"), 1, 96) == 2**20 // ((32 + 96) * 2 * 2 * 32 * 2)


def test_plan_batch_of_multi_step_generation_matches_hand_calculation() -> None:
    class Settings:
        num_generations, per_device_train_batch_size, gradient_accumulation_steps = 4, 6, 2
        generation_batch_size, steps_per_generation, num_iterations = 2 * 6 * 4, 4, 3
        max_completion_length, generation_lookahead = 100, 1
        completions_per_step = None
        spare_groups = 3

    batch = plan_batch(
        Settings,  # type: ignore[arg-type]
        ranks=[1, 1],
        engines=[2, 1],
        moves=False,
        prompt_tokens=50,
        engine_limit=120,
    )
    assert (batch.completions_per_step, batch.generation_completions, batch.generation_prompts) == (24, 48, 12)
    assert batch.optimizer_steps_per_generation == 6  # 4 micro-batches, 2 of them a step, each trained on 3 times
    assert (batch.node_completions, batch.straddles) == ((24, 24), False)
    assert batch.node_samples == (24 + 3 * 4 / 2,) * 2
    assert (batch.engine_completions, batch.generation_lookahead) == ((15, 30), 1)
    assert (batch.sequence_tokens, batch.tokens_per_step) == (120, 24 * 120)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(512, "512 B"), (671_088, "655 KiB"), (1.5 * GIB, "1.50 GiB"), (18.44 * GIB, "18.4 GiB"), (131 * GIB, "131 GiB")],
)
def test_readable_size_has_three_digits(num_bytes: float, text: str) -> None:
    assert readable(num_bytes) == text


def test_shape_of_model_without_attention_raises() -> None:
    with pytest.raises(ValueError, match="m is a mamba without attention heads"):
        shape_of(AutoConfig.for_model("mamba"), "m")
