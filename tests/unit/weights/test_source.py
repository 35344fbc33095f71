"""What a push sends, in which buckets, and how it is checked."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from grpo.weights.buckets import (
    ParamMeta,
    aligned,
    make_buckets,
    meta_bytes,
    packed_bytes,
    packed_offsets,
    packed_places,
)
from grpo.weights.completeness import unsent_names
from grpo.weights.gather import put_rows
from grpo.weights.layers import frozen_names, layer_groups
from grpo.weights.nccl import UNALIGNED
from grpo.weights.proof import LogprobGap, gap_between, gap_limit, is_due, probe_prompts
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import WireFormat, agreed
from tests.tiny_models import tiny_model

MB = 2**20


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([], 10, []),
        ([3, 3, 3], 10, [[0, 1, 2]]),
        ([3, 3, 5, 1], 6, [[0, 1], [2, 3]]),
        ([20, 3, 3], 6, [[0], [1, 2]]),  # larger than a bucket: alone
        ([3, 20, 3], 6, [[0], [1], [2]]),
        ([6, 6], 6, [[0], [1]]),
        ([0, 6, 0], 6, [[0, 1, 2]]),
    ],
)
def test_buckets(sizes: list[int], limit: int, buckets: list[list[int]]) -> None:
    assert make_buckets(sizes, limit) == buckets


def test_a_packed_buffer_is_aligned_and_in_order() -> None:
    metas = [ParamMeta(f"p{i}", torch.bfloat16, (size,)) for i, size in enumerate([3, 40, 64])]
    assert packed_offsets(metas) == [0, 64, 192]  # 6 bytes, then 80, which take two lines
    assert packed_bytes(metas) == 320
    assert (packed_offsets(metas, 1), packed_bytes(metas, 1)) == ([0, 6, 86], 214)
    buffer = torch.zeros(packed_bytes(metas), dtype=torch.uint8)
    for index, place in enumerate(packed_places(buffer, metas)):
        assert (place.dtype, place.shape) == (metas[index].dtype, metas[index].shape)
        place.fill_(1.0)
    assert buffer.view(torch.bfloat16).sum() == 3 + 40 + 64
    assert (packed_offsets([]), packed_bytes([])) == ([], 0)


@pytest.mark.parametrize(("numel", "ranks"), [(12, 3), (10, 3), (7, 4), (2, 3), (1, 1), (5, 1)])
def test_shards_are_put_together_without_their_padding(numel: int, ranks: int) -> None:
    shard = -(-numel // ranks)
    rows = torch.arange(ranks * shard, dtype=torch.float32).view(ranks, shard)
    expected = torch.arange(numel, dtype=torch.bfloat16)
    at_once, one_by_one = torch.full((2, numel), -1, dtype=torch.bfloat16)
    put_rows(at_once, rows, 0)
    for rank in range(ranks):
        put_rows(one_by_one, rows[rank : rank + 1], rank)
    put_rows(one_by_one, rows[:0], 0)  # the ranks before rank 0
    assert torch.equal(at_once, expected)
    assert torch.equal(one_by_one, expected)


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


def test_a_bucket_of_several_dtypes_is_taken_apart_by_vllms_own_worker() -> None:
    """Without gaps, in any order that the model has: an odd number of bfloat16 before a float32 cannot be viewed."""
    metas = [
        ParamMeta("odd", torch.bfloat16, (3,)),
        ParamMeta("bias", torch.float32, (5,)),
        ParamMeta("none", torch.float32, (0, 2)),
        ParamMeta("table", torch.int64, (1,)),
        ParamMeta("byte", torch.uint8, (3,)),
        ParamMeta("last", torch.float32, (1,)),
    ]

    def travel(metas: Sequence[ParamMeta]) -> dict[str, torch.Tensor]:
        buffer = torch.zeros(packed_bytes(metas, UNALIGNED), dtype=torch.uint8)
        for index, place in enumerate(packed_places(buffer, metas, UNALIGNED)):
            place.fill_(index + 1)
        dtypes = [meta.dtype for meta in metas]
        shapes = [list(meta.shape) for meta in metas]
        return dict(unpack_tensor(buffer, [m.name for m in metas], shapes, dtypes, [meta_bytes(m) for m in metas]))

    with pytest.raises(RuntimeError, match="divisible"):
        travel(metas)
    arrived = travel(aligned(metas))
    assert arrived.keys() == {meta.name for meta in metas}
    for index, meta in enumerate(aligned(metas)):
        tensor = arrived[meta.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
        assert (tensor == index + 1).all()


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


def test_engines_that_hold_different_forms_are_refused() -> None:
    one = WireFormat(dtypes={"gate.bias": "float32"}, whole_experts=("experts",))
    assert agreed([one, one]) == one
    with pytest.raises(RuntimeError, match=r"gate\.bias.* different forms"):
        agreed([one, WireFormat(whole_experts=("experts",))])
    with pytest.raises(RuntimeError, match=r"experts.* different forms"):
        agreed([one, WireFormat(dtypes=one.dtypes)])


def test_buckets_keep_to_the_limit_and_a_small_model_is_cut_too() -> None:
    trained = tiny_model("qwen2-tied")
    for limit in (MB // 8, MB, 512 * MB):
        source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=limit)
        largest = max(packed_bytes(bucket.metas) for bucket in source.plan().buckets)
        assert largest <= source.buffer_bytes <= max(limit, 512 * 128 * 4)  # the embedding is larger than MB // 8
    assert len(source.plan().buckets) > 1  # of a limit that would take all of the model


# -- what is frozen -------------------------------------------------------------------------------------------------


def test_which_parameters_may_share_a_layer_of_the_engine() -> None:
    groups = layer_groups(tiny_model("qwen2-tied"))
    layer = "model.layers.1"
    fused = [f"{layer}.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    assert len({groups[name] for name in fused}) == 1
    assert groups[f"{layer}.mlp.gate_proj.weight"] == groups[f"{layer}.mlp.up_proj.weight"]
    alone = ["self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    apart = {groups[f"{layer}.{name}.weight"] for name in alone}
    apart |= {groups[name] for name in ("model.embed_tokens.weight", "model.norm.weight", fused[0])}
    assert len(apart) == 7
    untied = layer_groups(tiny_model("llama-untied"))
    assert untied["lm_head.weight"] != untied["model.embed_tokens.weight"]
    experts = layer_groups(tiny_model("qwen3-moe"))
    assert len({group for name, group in experts.items() if ".layers.0.mlp." in name}) == 1  # router and experts


def test_vllm_fuses_no_two_parameters_that_are_told_apart() -> None:
    """Read from vLLM's own tables of all its models, without importing them."""
    import ast
    import importlib.util
    from pathlib import Path

    from grpo.weights.layers import OUTPUT_PROJECTIONS

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    seen = 0
    for path in (Path(spec.origin).parent / "model_executor" / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                if getattr(node.targets[0], "id", "") != "packed_modules_mapping":
                    continue
                for value in node.value.values:
                    if isinstance(value, ast.List) and len(value.elts) > 1:
                        parts = [ast.literal_eval(part) for part in value.elts]
                        leaves = {part.rpartition(".")[2] for part in parts}
                        assert not leaves & set(OUTPUT_PROJECTIONS), f"{path.name}: {parts}"
                        assert len({part.rpartition(".")[0] for part in parts}) == 1, f"{path.name}: {parts}"
                        seen += 1
    assert seen > 50  # the tables were found


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


def test_nothing_frozen_is_told_from_nothing_trained() -> None:
    trained = tiny_model("llama-untied")
    assert frozen_names(trained) == frozenset()
    trained.requires_grad_(False)
    assert frozen_names(trained) == {name for name, _ in trained.named_parameters()}


def test_a_frozen_router_leaves_its_bias_to_travel_and_other_parameters_go_with_their_buffer() -> None:
    trained = tiny_model("glm4-moe")
    trained.requires_grad_(False)
    trained.model.norm.register_buffer("scale", torch.ones(1))
    source = GatheredSource(trained, wire_dtype=torch.float32, bucket_bytes=MB)
    source.mark_sent()
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)}
    assert walk(source).keys() == biases | {"model.norm.scale", "model.norm.weight"}


def test_the_probe_is_fixed_and_leaves_special_tokens_out() -> None:
    probe = probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert probe == probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert (len(probe), {len(prompt) for prompt in probe}) == (4, {32})
    assert not {0, 1, 50} & {token for prompt in probe for token in prompt}
    assert {len(prompt) for prompt in probe_prompts(100, 10)} == {9}


def test_gaps() -> None:
    gap = gap_between([[-1.0, -2.0], [-3.0, -4.0]], np.array([[-1.0, -2.5], [-3.0, -4.0]]))
    assert (gap.mean, gap.max) == (0.125, 0.5)
    assert gap_between([[float("nan")]], np.array([[-1.0]])).mean == float("inf")
    assert [number for number in range(1, 41) if is_due(number)] == [*range(1, 11), 20, 30, 40]


def test_a_push_is_checked_by_name_too() -> None:
    known = {"a", "b", "c"}
    assert unsent_names(known=set(), received=known, held=()) == []
    assert unsent_names(known=known, received={"a", "b"}, held={"c"}) == []
    assert unsent_names(known=known, received={"a"}, held={"c"}) == ["b: not sent, and not among the frozen ones"]
    assert unsent_names(known=set(), received={"a"}, held={"c"}) == ["c: left out, but never sent before"]


def test_the_first_gap_tightens_the_limit_and_never_loosens_it() -> None:
    def limit(first: float | None, asked: float | None = None, dtype: torch.dtype = torch.bfloat16) -> float:
        gap = None if first is None else LogprobGap(mean=first, max=9.0)
        return round(gap_limit(dtype, asked=asked, first=gap), 6)

    assert limit(None) == 0.15
    assert limit(0.012) == 0.06
    assert limit(0.001) == 0.015  # a tenth of the dtype's: kernels may round otherwise for other tokens
    assert limit(0.149) == 0.15  # a first push that is bad is not the measure
    assert limit(3e-6, dtype=torch.float32) == 1e-4
    assert [limit(first, asked=0.4) for first in (None, 0.001, 0.3)] == [0.4] * 3
