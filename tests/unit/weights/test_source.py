"""What a push sends: what `save_pretrained` writes, in the engines' forms, without what they hold already."""

from typing import Any

import pytest
import torch

from grpo.weights.buckets import packed_bytes, packed_places
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import WireFormat
from tests.support.tiny_models import tiny_model

MB = 2**20


def walk(source: GatheredSource) -> dict[str, torch.Tensor]:
    """Everything that the next push of `source` takes."""
    taken = {}
    for bucket in source.plan().buckets:
        buffer = torch.empty(packed_bytes(bucket.metas), dtype=torch.uint8)
        places = packed_places(buffer, bucket.metas)
        source.fill(bucket, places)
        source.fill(bucket, None)  # a rank that takes part alone
        taken |= dict(zip([meta.name for meta in bucket.metas], places, strict=True))
    return taken


@pytest.mark.parametrize("family", ["qwen2-tied", "llama-untied", "gemma2-tied", "phi3-fused", "qwen3-moe", "glm4-moe"])
def test_the_source_yields_what_save_pretrained_writes(family: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    trained = tiny_model(family)
    trained.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB // 4)
    sent = walk(source)
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(sent[name], tensor), name
    plan = source.plan()
    assert len(plan.buckets) > 2
    assert plan.num_bytes == sum(t.numel() * t.element_size() for t in saved.values())
    assert plan.held == ()


def test_a_tied_weight_travels_once_and_in_the_wire_dtype() -> None:
    trained = tiny_model("qwen2-tied")
    sent = walk(GatheredSource(trained, wire_dtype=torch.bfloat16, bucket_bytes=MB))
    assert "lm_head.weight" not in sent
    for name, parameter in trained.named_parameters():
        assert torch.equal(sent[name], parameter.to(torch.bfloat16)), name


def test_buffers_travel_as_they_are_held_and_rotary_frequencies_do_not() -> None:
    trained = tiny_model("glm4-moe")
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)}
    assert any("inv_freq" in name for name, _ in trained.named_buffers())
    source = GatheredSource(trained, wire_dtype=torch.bfloat16, bucket_bytes=MB)
    routers = {name.replace("e_score_correction_bias", "weight") for name in biases}
    source.adopt(WireFormat(dtypes=dict.fromkeys(biases | routers, "float32")))
    sent = walk(source)
    assert not [name for name in sent if "inv_freq" in name]
    for name, tensor in sent.items():
        assert tensor.dtype == (torch.float32 if name in biases | routers else torch.bfloat16), name
    state = trained.state_dict()
    for name in biases | routers:
        assert torch.equal(sent[name], state[name]), name
    assert sent[next(iter(biases))].abs().max() == 0.5
    assert {*source.buffers} == biases
    source.adopt(WireFormat(computed=tuple(biases)))  # an engine that takes them from no checkpoint
    assert walk(source).keys() == sent.keys() - biases


@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe"])
def test_experts_that_the_engine_loads_at_once_travel_as_the_trainer_holds_them(family: str) -> None:
    trained = tiny_model(family)
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    one_by_one = walk(source)
    names = {stack.name for stack in source.experts}
    assert names == {name for name, parameter in trained.named_parameters() if parameter.dim() == 3}
    for stack in source.experts:
        whole = trained.get_parameter(stack.name)
        for part, values in zip(stack.parts, whole.chunk(len(stack.parts), dim=1), strict=True):
            for name, value in zip(part, values, strict=True):
                assert torch.equal(one_by_one[name], value), name
    source.adopt(WireFormat(whole_experts=tuple(names)))
    whole = walk(source)
    assert names < whole.keys()
    assert whole.keys() - names == {name for name in one_by_one if ".experts." not in name}
    for name in names:
        assert torch.equal(whole[name], trained.get_parameter(name))
    assert sum(tensor.nbytes for tensor in whole.values()) == sum(tensor.nbytes for tensor in one_by_one.values())


def test_buckets_keep_to_the_limit_and_a_small_model_is_cut_too() -> None:
    trained = tiny_model("qwen2-tied")
    for limit in (MB // 8, MB, 512 * MB):
        source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=limit)
        largest = max(packed_bytes(bucket.metas) for bucket in source.plan().buckets)
        assert largest <= source.buffer_bytes <= max(limit, 512 * 128 * 4)  # the embedding is larger than MB // 8
    assert len(source.plan().buckets) > 1  # of a limit that would take all of the model


def test_a_frozen_layer_is_sent_once_and_a_layer_with_one_trained_parameter_always() -> None:
    trained = tiny_model("qwen2-tied")
    for name, parameter in trained.named_parameters():
        trains = name in ("model.layers.0.self_attn.k_proj.bias", "model.layers.1.mlp.down_proj.weight")
        parameter.requires_grad_(trains)
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    everything = set(walk(source))
    assert source.plan().held == ()  # nothing was sent yet
    source.mark_sent()
    kinds = ("weight", "bias")
    qkv = {f"model.layers.0.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in kinds}
    again = set(walk(source))
    assert again == qkv | {"model.layers.1.mlp.down_proj.weight"}
    assert set(source.plan().held) == everything - again
    trained.get_input_embeddings().requires_grad_(True)  # trained from now on
    assert set(walk(source)) == again | {"model.embed_tokens.weight"}


def test_a_frozen_router_leaves_its_bias_to_travel_and_other_parameters_go_with_their_buffer() -> None:
    trained = tiny_model("glm4-moe")
    trained.requires_grad_(False)
    trained.model.norm.register_buffer("scale", torch.ones(1))
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    source.mark_sent()
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)}
    assert walk(source).keys() == biases | {"model.norm.scale", "model.norm.weight"}
