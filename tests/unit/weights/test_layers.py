"""Which parameters may share a layer of the engine, and which layers are frozen."""

import ast
import importlib.util
from pathlib import Path

from grpo.weights.layers import OUTPUT_PROJECTIONS, frozen_names, layer_groups
from tests.support.tiny_models import tiny_model


def test_layer_groups_join_parameters_of_fused_layers() -> None:
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


def test_layer_groups_agree_with_vllm_fused_modules() -> None:
    """Read from vLLM's own tables of all its models, without importing them."""
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


def test_frozen_names_match_parameters_without_gradients() -> None:
    trained = tiny_model("llama-untied")
    assert frozen_names(trained) == frozenset()
    trained.requires_grad_(False)
    assert frozen_names(trained) == {name for name, _ in trained.named_parameters()}
