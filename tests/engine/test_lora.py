"""Adapters in real engines: by themselves and merged, of all kinds; an engine that drops one is found out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from grpo import GRPOConfig
from grpo.faults.failure import JobFailed
from grpo.local_vllm import LocalVLLM
from grpo.preflight.lora import choose_lora
from grpo.weights.adapters import Lora
from grpo.weights.buckets import Bucket
from grpo.weights.source import GatheredSource
from tests.support.beside_model import PROMPTS, Progress, sampled_gap, started
from tests.support.tiny_models import save_tiny_model

STEPS = 5


def wrapped(folder: Path, **config: Any) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LoraConfig(**config))


def train(model: PeftModel, seed: int) -> None:
    """A large step: every weight that is trained changes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


@contextmanager
def engine_of(model: PeftModel, folder: Path, tmp_path: Path, way: str) -> Iterator[tuple[LocalVLLM, Progress]]:
    """An engine for a wrapped model, made as the trainer makes it."""
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    choice = choose_lora(model, None, None, args, has_gpus=False)
    assert choice is not None
    assert choice.way == way, choice
    progress, lora = Progress(), Lora(model, merges=way == "merge")
    slot = choice.slot if way == "adapter" else None
    with started(folder, lora.base, progress, tmp_path, lora=lora, slot=slot) as local:
        yield local, progress


def check_steps(model: PeftModel, local: LocalVLLM, progress: Progress) -> list[int]:
    """Some steps, after each of which the engine computes what the trainer does; what each weight sync brought."""
    synced = []
    for step in range(STEPS):
        progress.step = step
        train(model, step)
        local.sync_weights()
        _, completions, logprobs, _ = local.generate(PROMPTS, None, 1)
        assert sampled_gap(model, PROMPTS, completions, logprobs) < 1e-3
        assert local.last_sync is not None
        assert local.last_sync.gap is not None
        assert local.last_sync.gap.max < 1e-3
        synced.append(local.last_sync.num_bytes)
    with model.disable_adapter():
        assert sampled_gap(model, PROMPTS, completions, logprobs) > 0.1  # the adapter is no small thing
    return synced


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param(
            "llama-untied",
            {"r": 64, "lora_alpha": 16, "target_modules": "all-linear"},
            marks=pytest.mark.long,
        ),
        ("qwen3-tied", {"r": 1, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
        pytest.param(
            "phi3-fused",
            {"r": 8, "lora_alpha": 24, "use_rslora": True, "target_modules": "all-linear"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "gemma2-tied",
            {
                "r": 4,
                "lora_alpha": 8,
                "target_modules": ["q_proj", "o_proj", "up_proj"],
                "rank_pattern": {"o_proj": 9},
                "alpha_pattern": {"up_proj": 3},
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_sync_of_supported_lora_sends_adapter_bytes_only(family: str, config: dict, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path / "model")
    model = wrapped(folder, **config)
    with engine_of(model, folder, tmp_path, "adapter") as (local, progress):
        adapter_bytes = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
        assert check_steps(model, local, progress) == [adapter_bytes] * STEPS


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param(
            "llama-untied", {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, marks=pytest.mark.long
        ),
        pytest.param(
            "llama-untied",
            {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head", "norm"]},
            marks=pytest.mark.long,
        ),
        ("qwen3-moe", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    ],
)
def test_sync_of_unsupported_lora_sends_merged_weights(family: str, config: dict, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path / "model")
    model = wrapped(folder, r=4, lora_alpha=16, **config)
    with engine_of(model, folder, tmp_path, "merge") as (local, progress):
        first, *later = check_steps(model, local, progress)
    assert later == [later[0]] * len(later)
    assert later[0] < first  # layers without adapters stay behind


def test_sync_with_swapped_adapters_raises_and_removes_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one layer got another's, of the same shape, while B is zero in both."""
    folder = save_tiny_model("llama-untied", tmp_path / "model")
    model = wrapped(folder, r=4, lora_alpha=16, target_modules=["q_proj", "o_proj"])
    fill = GatheredSource.fill

    def swapped(self: GatheredSource, bucket: Bucket, places: list[torch.Tensor]) -> None:
        fill(self, bucket, places)
        by_name = {meta.name: place for meta, place in zip(bucket.metas, places, strict=True)}
        one, other = (by_name.get(f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_B.weight") for n in (0, 1))
        if one is not None and other is not None:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    monkeypatch.setattr(GatheredSource, "fill", swapped)
    with engine_of(model, folder, tmp_path, "adapter") as (local, _):
        with pytest.raises(JobFailed, match="GRPO-504"):
            local.sync_weights()
        for name, parameter in model.named_parameters():
            assert ".lora_B." not in name or not parameter.any(), "the noise is gone"


def test_sync_with_layer_unknown_to_engine_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would leave it out without a word."""
    folder = save_tiny_model("llama-untied", tmp_path / "model")
    model = wrapped(folder, r=4, lora_alpha=16, target_modules=["q_proj", "o_proj"])
    monkeypatch.setattr("grpo.weights.adapters.LayerAdapter.name_of", lambda self, part: named(self.path, part))

    def named(path: str, part: str) -> str:
        return f"base_model.model.{path.replace('o_proj', 'x_proj')}.{part}"

    with (
        engine_of(model, folder, tmp_path, "adapter") as (local, _),
        pytest.raises(JobFailed, match=r"adapts no layer model\.layers\.0\.self_attn\.x_proj.*vllm_lora"),
    ):
        local.sync_weights()
