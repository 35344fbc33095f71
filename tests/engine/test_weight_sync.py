"""One real engine, and a model beside it in this process: weight syncs that are right, wrong, and incomplete."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.engine.client import EngineError
from grpo.faults.failure import JobFailed, StepFailed
from grpo.faults.sessions import session_members
from grpo.local_vllm import LocalVLLM
from grpo.weights.buckets import Bucket
from grpo.weights.source import GatheredSource, WeightSyncPlan
from grpo.weights.wire_format import WireFormat
from tests.support.beside_model import END_TOKENS, PROMPTS, Progress, sampled_gap, started, turn_a_v_proj
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def progress() -> Progress:
    return Progress()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def local(
    tiny_model: Path, model: torch.nn.Module, progress: Progress, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalVLLM]:
    with started(tiny_model, model, progress, tmp_path_factory.mktemp("engine")) as engine:
        engine.sync_weights()
        yield engine


def disturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def test_weight_sync_after_large_changes_matches_model(
    local: LocalVLLM, model: torch.nn.Module, progress: Progress
) -> None:
    for step in range(3):
        progress.step = step
        disturb(model, step)
        local.sync_weights()
        _, completions, logprobs, _ = local.generate(PROMPTS, None, 1)
        assert sampled_gap(model, PROMPTS, completions, logprobs) < 1e-3
        assert local.policy_version == step
        assert local.last_sync is not None
        assert local.last_sync.gap is not None
        assert local.last_sync.gap.max < 1e-3
        assert local.engines.clients[0].call("weight_version", 10) == str(step)


def test_check_bits_with_other_sums_names_tensor(local: LocalVLLM) -> None:
    """The workers still have their sums of the last weight sync, which were what the trainer had sent."""
    client = local.engines.clients[0]
    with pytest.raises(EngineError, match=r"changed 1 tensors \[GRPO-506\]: model\.norm\.weight: other bits arrived"):
        client.call("check_bits", 60, sent={"model.norm.weight": 0})


def test_generate_repeats_samples_of_repeated_step_only(local: LocalVLLM, progress: Progress) -> None:
    progress.step = 10
    _, first, _, _ = local.generate(PROMPTS, None, 1)
    _, second, _, _ = local.generate(PROMPTS, None, 1)  # a second batch of the same step
    progress.step = 11
    _, later, _, _ = local.generate(PROMPTS, None, 1)
    progress.step = 10
    _, again, _, _ = local.generate(PROMPTS, None, 1)
    progress.mode = "eval"
    _, evaluated, _, _ = local.generate(PROMPTS, None, 1)
    progress.mode = "train"
    assert again == first
    for other in (second, later, evaluated):
        assert other != first
    for one, two in ((0, 1), (1, 2), (0, 2), (3, 4)):
        assert first[one] != first[two]


def test_generate_with_prompts_beyond_one_step_matches_model(local: LocalVLLM, model: torch.nn.Module) -> None:
    """A step takes 64 tokens: vLLM would cut the second prompt in two, and die of its seed."""
    prompts = [[5 + row] * 40 for row in range(4)]
    _, completions, logprobs, _ = local.generate(prompts, None, 1)
    assert sampled_gap(model, prompts, completions, logprobs) < 1e-3


def test_generate_ends_completions_at_trainer_end_tokens(local: LocalVLLM) -> None:
    """Also at a token that the engine's generation_config.json does not have; the token is there, and the last one."""
    _, completions, logprobs, _ = local.generate([[5, 6, row % 8 + 2] for row in range(64)], None, 1)
    ended = [completion for completion in completions if completion[-1] in END_TOKENS]
    assert END_TOKENS[1] in {completion[-1] for completion in ended}
    assert not any(token in END_TOKENS for completion in completions for token in completion[:-1])
    assert {len(completion) for completion in completions if completion not in ended} <= {12}  # the limit
    assert [len(row) for row in completions] == [len(row) for row in logprobs]


def test_generate_accepts_no_rows_and_refuses_long_prompt(local: LocalVLLM) -> None:
    assert local.generate([], None, 1)[1] == []
    _, completions, logprobs, _ = local.generate([[5, 6], [5] * 48], None, 1)
    assert local.refused_rows == [False, True]
    assert (len(completions[0]) > 1, completions[1]) == (True, [END_TOKENS[0]])
    ((logprob,),) = logprobs[1]
    assert np.isnan(logprob)
    _, completions, _, _ = local.generate([[5] * 46], None, 1)
    assert local.refused_rows is None
    assert len(completions[0]) <= 2  # cut at the engine's length


def test_weight_sync_with_wrong_values_raises_and_ends_engine(
    local: LocalVLLM, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last of those that share an engine."""
    turn_a_v_proj(monkeypatch)
    progress.step = 20
    pid = local.engines.clients[0].pid
    with pytest.raises(StepFailed, match=r"GRPO-508.* by [\d.]+ nats in the mean .* limit is 0.0001 .* a first gap"):
        local.sync_weights()
    assert not session_members(pid)


def hold_a_v_proj_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight and bias: the trainer says, wrongly, that they are frozen."""
    plan = GatheredSource.plan

    def without_a_v_proj(self: GatheredSource) -> WeightSyncPlan:
        buckets, held = [], []
        for bucket in plan(self).buckets:
            held += [pair[0] for pair in bucket.parameters if "layers.1.self_attn.v_proj." in pair[0]]
            parameters = tuple(pair for pair in bucket.parameters if pair[0] not in held)
            buckets.append(Bucket(parameters=parameters, metas=tuple(m for m in bucket.metas if m.name not in held)))
        return WeightSyncPlan(buckets=tuple(buckets), held=tuple(held))

    monkeypatch.setattr(GatheredSource, "plan", without_a_v_proj)


# Of the first layer all but one norm is frozen, as is the embedding; of the second, a part of a fused layer.
FROZEN_WHOLE = ("embed_tokens", "layers.0.self_attn", "layers.0.mlp", "layers.0.input_layernorm")
FAR = 5e-3  # a stale or missing tensor shows as 0.1 up
FROZEN_PARTS = ("layers.1.self_attn.k_proj", "layers.1.self_attn.q_proj.bias", "layers.1.mlp.gate_proj")


def balance(model: torch.nn.Module) -> None:
    """What code that balances experts does between two weight syncs, at its largest: other experts are chosen now."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.roll(buffer, 3))


@pytest.mark.parametrize(
    "family",
    ["qwen2-tied", *(pytest.param(each, marks=pytest.mark.long) for each in ("llama-untied", "qwen3-moe", "glm4-moe"))],
)
def test_weight_sync_with_frozen_layers_skips_them_and_matches_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied (with biases), untied, experts, experts with a router's bias.

    A large change of what is trained before every one of five weight syncs, and of the router's bias, which travels
    though the router is frozen. At last a parameter is missing that was synced before, and is named.
    """
    path = save_tiny_model(family, tmp_path / family)
    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    progress = Progress()

    def train() -> None:
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)

    def sync_and_verify() -> int:
        train()
        balance(trained)
        progress.step += 1
        local.sync_weights()
        assert local.last_sync is not None
        assert local.last_sync.gap is not None
        assert local.last_sync.gap.max < FAR
        return local.last_sync.num_bytes

    with started(path, trained, progress, tmp_path / "engine", max_gap=FAR) as local:
        everything = sync_and_verify()
        train()  # and frozen only then: what was synced is not what stays
        for name, parameter in trained.named_parameters():
            parameter.requires_grad_(not any(part in name for part in (*FROZEN_WHOLE, *FROZEN_PARTS)))
        stays = sum(
            parameter.numel() * 4
            for name, parameter in trained.named_parameters()
            if any(part in name for part in FROZEN_WHOLE)
        )
        assert 0 < stays < everything
        assert [sync_and_verify() for _ in range(3)] == [everything, everything - stays, everything - stays]
        trained.requires_grad_(True)
        assert sync_and_verify() == everything

        hold_a_v_proj_back(monkeypatch)
        said = r"layers\.1\.self_attn\.qkv_proj: \d+ of \d+ elements arrived, without .*v_proj"
        with pytest.raises(JobFailed, match=said):
            local.sync_weights()


def test_weight_sync_to_bfloat16_engine_keeps_router_in_float32(tmp_path: Path) -> None:
    path = save_tiny_model("glm4-moe", tmp_path / "model")
    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    progress = Progress()
    with started(path, trained, progress, tmp_path / "engine", dtype=torch.bfloat16) as local:
        for step in range(2):
            balance(trained)
            progress.step = step
            local.sync_weights()
            assert local.last_sync is not None
            assert local.last_sync.gap is not None
            assert local.last_sync.gap.mean < 0.01
        assert local._serving is not None
        source = local._serving.delivery.syncer.source
        in_float32 = {meta.name for meta in source.plan().metas if meta.dtype == torch.float32}
        router = ("weight", "e_score_correction_bias")
        assert in_float32 == {f"model.layers.{layer}.mlp.gate.{name}" for layer in range(2) for name in router}
        wire_format = WireFormat(whole_experts=tuple(stack.name for stack in source.experts))
        source.adopt(wire_format)  # a trainer that takes all for bfloat16
        with pytest.raises(JobFailed, match=r"gate\.\w+ was sent in torch.bfloat16, but .* holds it in torch.float32"):
            local.sync_weights()
