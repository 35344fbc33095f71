"""The engine's side of a weight sync, over vLLM's own reload of a model of a few tensors, without an engine."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.models.utils import AutoWeightsLoader

from grpo.weights.buckets import ParamMeta, described
from grpo.weights.completeness import IncompleteSyncError
from grpo.weights.destinations import Arrival, Destination, whole_loads
from grpo.weights.reload import CountedReload
from grpo.weights.wire_format import WireFormat

BIAS = "layer.gate.e_score_correction_bias"


class Router(nn.Module):
    """As in Glm4MoE: what vLLM counts, and what it leaves out of its count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.full([4], 1e-3), requires_grad=False)


class Experts(nn.Module):
    """Holds its router's bias, too, and a scale as Gemma 4's layers do."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.e_score_correction_bias = bias
        self.register_buffer("layer_scalar", torch.full([1], 1e-3, dtype=torch.bfloat16))
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)
        self._expert_map: torch.Tensor
        self.register_buffer("_expert_map", torch.arange(4))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = Experts(self.gate.e_score_correction_bias)


class Model(nn.Module):
    """Renames, as many of vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        renamed = ((name.removeprefix("model."), weight) for name, weight in weights)
        return AutoWeightsLoader(self).load_weights(renamed)


class Engine(CountedReload):
    """Without a transport."""

    def __init__(self) -> None:
        self.model = Model()
        record_metadata_for_reloading(self.model)
        self.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=SimpleNamespace())  # type: ignore[assignment]
        self.device = torch.device("cpu")

    def init_transfer_engine(self, init_info: Any) -> None: ...
    def receive_weights(self, update_info: Any) -> None: ...
    def shutdown(self) -> None: ...

    def sync(self, weights: dict[str, torch.Tensor], held: Sequence[str] = ()) -> None:
        self.start_weight_update()
        self.note_received(list(weights), list(held))
        self.load(list(weights.items()))
        self.finish_weight_update()


def weights(value: float = 1.0, scalar: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {
        "model.layer.gate.weight": torch.full((4, 3), value),
        "model.layer.gate.e_score_correction_bias": torch.full((4,), value),
        "model.layer.experts.layer_scalar": torch.full((1,), value, dtype=scalar),
    }


def test_engine_sync_writes_into_tensors_held_by_kernels() -> None:
    engine = Engine()
    experts, gate = engine.model.layer.experts, engine.model.layer.gate
    kept = (gate.weight, experts.e_score_correction_bias, experts.layer_scalar)  # as a router, or a CUDA graph, keeps
    for value in (1.0, 2.0, 3.0):
        engine.sync(weights(value))
        assert [tensor.unique().item() for tensor in kept] == [value] * 3
        assert experts.e_score_correction_bias is gate.e_score_correction_bias is kept[1]
    assert (experts.inv_freq.tolist(), experts._expert_map.tolist()) == ([1, 1], [0, 1, 2, 3])
    assert not hasattr(kept[1], "weight_loader") or kept[1].weight_loader.__name__ == "default_weight_loader"


@pytest.mark.parametrize("missing", ["gate.e_score_correction_bias", "experts.layer_scalar"])
def test_engine_sync_without_uncounted_tensor_names_it(missing: str) -> None:
    engine = Engine()
    sent = {name: weight for name, weight in weights().items() if name != f"model.layer.{missing}"}
    with pytest.raises(IncompleteSyncError, match=rf"1 places \[GRPO-503\]: layer\.{missing}: no weight sync has"):
        engine.sync(sent)


def test_engine_sync_of_partial_layer_raises() -> None:
    """vLLM does, of a whole number too, which dummy loading leaves alone."""
    engine = Engine()
    engine.model.layer.experts.register_buffer("hash_table", torch.arange(4))
    record_metadata_for_reloading(engine.model)
    with pytest.raises(IncompleteSyncError, match=r"GRPO-503.*layer\.experts\.hash_table: not sent, though others"):
        engine.sync(weights())


class Fused(nn.Module):
    """Of two halves in the checkpoint, as `qkv_proj` is of three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Module()
        self.gate_up_proj.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.gate_up_proj.weight.weight_loader = self._load  # type: ignore[assignment]

    @staticmethod
    def _load(param: nn.Parameter, loaded: torch.Tensor, half: int) -> None:
        param.data[2 * half : 2 * half + 2].copy_(loaded)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            parameter = self.gate_up_proj.weight
            parameter.weight_loader(parameter, weight, ["gate_proj", "up_proj"].index(name))


@pytest.mark.parametrize("sent", [{"gate_proj": 1.0}, {"gate_proj": 1.0, "up_proj": 2.0}])
def test_engine_sync_of_fused_layer_requires_both_halves(sent: dict[str, float]) -> None:
    engine = Engine()
    engine.model = Fused()  # type: ignore[assignment]
    record_metadata_for_reloading(engine.model)
    halves = {name: torch.full((2, 3), value) for name, value in sent.items()}
    if len(sent) == 1:
        with pytest.raises(IncompleteSyncError, match="gate_up_proj: 6 of 12 elements arrived"):
            engine.sync(halves)
    else:
        engine.sync(halves)
        assert engine.model.gate_up_proj.weight.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2


def test_engine_sync_keeps_held_frozen_layer_after_first_sync() -> None:
    engine = Engine()
    engine.sync(weights(1.0))
    router = "model.layer.gate.weight"
    engine.sync({name: weight for name, weight in weights(2.0).items() if name != router}, held=[router])
    gate = engine.model.layer.gate
    assert (gate.weight.unique().item(), gate.e_score_correction_bias.unique().item()) == (1.0, 2.0)


@pytest.mark.parametrize("name", ["gate.weight", "gate.e_score_correction_bias"])
def test_engine_sync_with_other_dtype_names_tensor(name: str) -> None:
    engine = Engine()
    engine.sync(weights())
    wrong = weights()
    wrong[f"model.layer.{name}"] = wrong[f"model.layer.{name}"].bfloat16()
    with pytest.raises(IncompleteSyncError, match=rf"layer\.{name} was sent in torch.bfloat16, .* in torch.float32"):
        engine.sync(wrong)


def question(**shapes: tuple[int, ...]) -> dict[str, Any]:
    names = {name: tuple(weight.shape) for name, weight in weights().items()}
    metas = [ParamMeta(name, torch.bfloat16, shape) for name, shape in {**names, **shapes}.items()]
    buffers = [name for name in shapes if name.startswith("buffer")]
    experts = [{"name": "stack", "parts": [["model.layer.gate.weight"]]}]
    return {"metas": described(metas), "buffers": buffers, "experts": experts}


def test_wire_format_of_engine_reports_dtypes_and_changes_nothing() -> None:
    engine = Engine()
    engine.sync(weights(2.0))
    kept = dict(engine.model.named_parameters()) | dict(engine.model.named_buffers())
    values = {name: tensor.clone() for name, tensor in kept.items()}
    assert engine.wire_format(question(buffer_of_the_trainers=(2,))) == WireFormat(
        dtypes={"model.layer.gate.weight": "float32", "model.layer.gate.e_score_correction_bias": "float32"},
        computed=("buffer_of_the_trainers",),
    )
    after = dict(engine.model.named_parameters()) | dict(engine.model.named_buffers())
    assert all(after[name] is tensor and torch.equal(tensor, values[name]) for name, tensor in kept.items())
    engine.sync(weights(3.0))
    with pytest.raises(ValueError, match="unheard_of"):
        engine.wire_format(question(unheard_of=(1,)))


class PassesOver(Model):
    """As vLLM's loaders of qwen3_moe, deepseek_v2 and others do with a bias that they do not know."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        known = {f"model.{name}" for name, _ in (*self.named_parameters(), *self.named_buffers())}
        return super().load_weights((name, w) for name, w in weights if not name.endswith(".bias") or name in known)


def test_wire_format_lists_silently_skipped_tensor_as_unplaced() -> None:
    engine = Engine()
    engine.model = PassesOver()
    record_metadata_for_reloading(engine.model)
    bias = "model.layer.gate.bias"
    assert engine.wire_format(question(**{bias: (4,)})).unplaced == (bias,)
    for value in (1.0, 2.0):  # what weight syncs with it do not show
        engine.sync({**weights(value), bias: torch.full((4,), value)})


class Computes(Model):
    """Loads a sum of two tensors in place of the first, and a copy in another dtype: no view of what came."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        came = dict(weights)
        if (second := came.pop("model.layer.gate.second", None)) is not None:
            came["model.layer.gate.weight"] = came["model.layer.gate.weight"].float() + second.t().contiguous()
        return super().load_weights(came.items())


def test_wire_format_counts_tensor_combined_in_loader_as_placed() -> None:
    engine = Engine()
    engine.model = Computes()
    record_metadata_for_reloading(engine.model)
    answer = engine.wire_format(question(**{"model.layer.gate.second": (3, 4)}))
    assert (answer.unplaced, {*answer.dtypes}) == ((), {"model.layer.gate.e_score_correction_bias"})


def test_whole_loads_with_foreign_experts_layer_returns_none() -> None:
    layer = Experts(nn.Parameter(torch.zeros(2, 3, 3)))
    place = Destination(path="experts.w2", layer=layer, name="w2", tensor=layer.e_score_correction_bias)
    calls = {str(i): [Arrival(destination=place, details={"shard_id": "w2", "expert_id": i})] for i in range(2)}
    assert whole_loads([["0", "1"]], calls) is None
    assert whole_loads([["0", "unknown"]], calls) is None


def test_note_received_with_repeated_name_raises() -> None:
    engine = Engine()
    engine.start_weight_update()
    engine.note_received(["model.layer.gate.weight"], [])
    with pytest.raises(IncompleteSyncError, match=r"the weight sync sends model\.layer\.gate\.weight twice"):
        engine.note_received(["model.layer.gate.weight"], [])
