"""What a weight sync sends: what `save_pretrained` writes, in the engines' forms, without what they hold already."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo.weights.adapters import Lora
from grpo.weights.buckets import packed_bytes, packed_places
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import WireFormat
from tests.support.tiny_models import tiny_model

MB = 2**20


def walk(source: GatheredSource) -> dict[str, torch.Tensor]:
    """Everything that the next weight sync of `source` takes."""
    taken = {}
    for bucket in source.plan().buckets:
        buffer = torch.empty(packed_bytes(bucket.metas), dtype=torch.uint8)
        places = packed_places(buffer, bucket.metas)
        source.fill(bucket, places)
        source.fill(bucket, None)  # a rank that takes part alone
        taken |= dict(zip([meta.name for meta in bucket.metas], places, strict=True))
    return taken


@pytest.mark.parametrize("family", ["qwen2-tied", "llama-untied", "gemma2-tied", "phi3-fused", "qwen3-moe", "glm4-moe"])
def test_source_matches_save_pretrained(family: str, tmp_path: Any) -> None:
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


def test_source_sends_tied_weight_once_in_wire_dtype() -> None:
    trained = tiny_model("qwen2-tied")
    sent = walk(GatheredSource(trained, wire_dtype=torch.bfloat16, bucket_bytes=MB))
    assert "lm_head.weight" not in sent
    for name, parameter in trained.named_parameters():
        assert torch.equal(sent[name], parameter.to(torch.bfloat16)), name


def test_source_sends_router_biases_but_no_rotary_frequencies() -> None:
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
def test_source_with_whole_experts_sends_stacked_parameters(family: str) -> None:
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


def test_source_buckets_keep_limit_and_split_small_model() -> None:
    trained = tiny_model("qwen2-tied")
    for limit in (MB // 8, MB, 512 * MB):
        source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=limit)
        largest = max(packed_bytes(bucket.metas) for bucket in source.plan().buckets)
        assert largest <= source.buffer_bytes <= max(limit, 512 * 128 * 4)  # the embedding is larger than MB // 8
    assert len(source.plan().buckets) > 1  # of a limit that would take all of the model


def test_source_sends_frozen_layer_once_and_partly_trained_always() -> None:
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


def test_source_of_frozen_model_still_sends_buffers() -> None:
    trained = tiny_model("glm4-moe")
    trained.requires_grad_(False)
    trained.model.norm.register_buffer("scale", torch.ones(1))
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    source.mark_sent()
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)}
    assert walk(source).keys() == biases | {"model.norm.scale", "model.norm.weight"}


# -- what stands under the names now ---------------------------------------------------------------------------------

BALANCE = "model.layers.0.mlp.balance"


def balanced_model() -> Any:
    """With a buffer that is replaced by another tensor when it changes, as code that balances experts does."""
    trained = tiny_model("qwen2-tied")
    trained.model.layers[0].mlp.register_buffer("balance", torch.zeros(4))
    return trained


def source_of(trained: Any) -> GatheredSource:
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    walk(source)
    source.mark_sent()
    return source


def test_source_sends_replaced_tensor_under_same_name() -> None:
    trained = balanced_model()
    source = source_of(trained)
    mlp, norm = trained.model.layers[0].mlp, trained.model.norm
    mlp.balance = mlp.balance + 1
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 2)
    trained.model.layers[1].mlp.down_proj = torch.nn.Linear(256, 128, bias=False)
    sent = walk(source)
    assert sent[BALANCE].tolist() == [1.0] * 4
    assert torch.equal(sent["model.norm.weight"], norm.weight)
    assert torch.equal(sent["model.layers.1.mlp.down_proj.weight"], trained.model.layers[1].mlp.down_proj.weight)
    planned = {name: tensor for bucket in source.plan().buckets for name, tensor in bucket.parameters}
    assert planned.keys() == {*dict(trained.named_parameters()), BALANCE}
    assert all(planned[name] is parameter for name, parameter in trained.named_parameters())


def as_another_parameter(trained: Any) -> None:
    trained.model.norm.weight = torch.nn.Parameter(torch.ones(96))


def inside_of_the_parameter(trained: Any) -> None:
    trained.model.norm.weight.data = torch.ones(96)


def as_another_dtype(trained: Any) -> None:
    trained.model.layers[0].mlp.balance = torch.zeros(4, dtype=torch.int32)


def under_no_name(trained: Any) -> None:
    del trained.model.norm.weight


def without_the_tie(trained: Any) -> None:
    trained.lm_head.weight = torch.nn.Parameter(trained.lm_head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (as_another_parameter, r"model\.norm\.weight is torch\.float32 of shape \(96,\), and was .* of \(128,\)"),
        (inside_of_the_parameter, r"model\.norm\.weight is torch\.float32 of shape \(96,\)"),
        (as_another_dtype, r"mlp\.balance is torch\.int32 of shape \(4,\), and was torch\.float32"),
        (under_no_name, r"model\.norm\.weight is gone"),
        (without_the_tie, r"lm_head\.weight has come"),
    ],
)
def test_source_plan_with_changed_shape_or_names_raises(change: Callable[[Any], None], said: str) -> None:
    trained = balanced_model()
    source = source_of(trained)
    change(trained)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"\[GRPO-507\]: .*{said}"):
            source.plan()


def test_source_ignores_buffer_registered_later() -> None:
    trained = balanced_model()
    source = source_of(trained)
    trained.model.register_buffer("average", torch.zeros(4))
    assert "model.average" not in walk(source)


def write_by_copy(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1)


def write_by_data(parameter: torch.nn.Parameter) -> None:
    parameter.data.add_(1)


def write_another_data(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data + 1


@pytest.mark.parametrize(
    ("write", "counted"), [(write_by_copy, True), (write_by_data, False), (write_another_data, False)]
)
def test_source_resends_frozen_layer_after_write(write: Callable[[torch.nn.Parameter], None], counted: bool) -> None:
    trained = tiny_model("qwen2-tied")
    trained.requires_grad_(False)
    trained.model.norm.weight.requires_grad_(True)
    source = source_of(trained)
    attention = trained.model.layers[0].self_attn
    for _ in range(2):
        assert source.written(by_sums=True) == []
        assert walk(source).keys() == {"model.norm.weight"}
        source.mark_sent()
        write(attention.q_proj.weight)
        name = "model.layers.0.self_attn.q_proj.weight"
        assert source.written(by_sums=False) == ([name] if counted else [])
        assert source.written(by_sums=True) == [name]
        source.send_again(source.written(by_sums=True))
        kinds = ("weight", "bias")
        qkv = {f"model.layers.0.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in kinds}
        sent = walk(source)
        assert sent.keys() == qkv | {"model.norm.weight"}  # vLLM takes no part of a fused layer
        assert torch.equal(sent[name], attention.q_proj.weight)
        source.mark_sent()


def test_source_sends_replaced_frozen_parameter_once() -> None:
    trained = tiny_model("qwen2-tied")
    trained.requires_grad_(False)
    source = source_of(trained)
    norm = trained.model.norm
    norm.weight = torch.nn.Parameter(norm.weight * 2, requires_grad=False)
    assert torch.equal(walk(source)["model.norm.weight"], norm.weight)
    source.mark_sent()
    assert source.plan().buckets == ()


@pytest.mark.parametrize("merges", [False, True])
def test_source_with_replaced_adapter_sends_new_values(merges: bool) -> None:
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    wrapped = get_peft_model(tiny_model("qwen2-tied"), settings)
    lora = Lora(wrapped, merges=merges)
    source = GatheredSource(lora.base, wire_dtype=torch.float32, bucket_bytes=MB, lora=lora)
    walk(source)
    source.mark_sent()
    layer = lora.base.model.layers[0].self_attn.q_proj
    layer.lora_A["default"].weight = torch.nn.Parameter(torch.ones(4, 128))
    layer.lora_B["default"].weight = torch.nn.Parameter(torch.ones(128, 4))
    layer.scaling["default"] = 3.0  # from 2
    sent = walk(source)
    if merges:
        changed = layer.get_base_layer().weight + 3.0 * 4
        assert torch.allclose(sent["model.layers.0.self_attn.q_proj.weight"], changed)
    else:
        assert sent["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].unique().tolist() == [1.0]
        assert sent["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].unique().tolist() == [3.0]
    assert source.written(by_sums=True) == []


def test_source_plan_with_unplaced_trained_parameter_raises() -> None:
    trained = tiny_model("qwen2-tied")
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    bias = "model.layers.0.self_attn.q_proj.bias"
    source.adopt(WireFormat(unplaced=(bias,)))
    with pytest.raises(ValueError, match=rf"no place for what is trained in {bias} \[GRPO-505\]"):
        source.plan()
    trained.get_parameter(bias).requires_grad_(False)
    assert bias in walk(source)
    source.mark_sent()
    trained.get_parameter(bias).requires_grad_(True)  # trained from now on
    with pytest.raises(ValueError, match="GRPO-505"):
        source.plan()
