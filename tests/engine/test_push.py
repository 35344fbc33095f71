"""One real engine, and a model beside it in this process: pushes that are right, wrong, and incomplete."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo import GRPOConfig
from grpo.engine.lifetime import session_members
from grpo.engine.starting import StartingEngines
from grpo.engine_settings import EngineModel, engine_spec
from grpo.job.failure import JobFailed
from grpo.job.node_groups import NodeGroups
from grpo.job.topology import read_topology
from grpo.job.watch import FailureWatch
from grpo.local_vllm import LocalVLLM, TrainedModel
from grpo.weights.buckets import Bucket
from grpo.weights.source import GatheredSource, PushPlan
from grpo.weights.wire_format import WireFormat
from tests.tiny_models import save_tiny_model


class Progress:
    """The optimizer step, as a test wants it."""

    step = 0
    mode = "train"

    def __call__(self) -> tuple[int, str]:
        return self.step, self.mode


@pytest.fixture(scope="module")
def progress() -> Progress:
    return Progress()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@contextlib.contextmanager
def started(
    tiny_model: Path,
    model: torch.nn.Module,
    progress: Progress,
    output_dir: Path,
    dtype: torch.dtype = torch.float32,
    max_gap: float | None = None,
) -> Iterator[LocalVLLM]:
    args = GRPOConfig(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=False,
        max_completion_length=12,
        vllm_max_model_length=48,
        vllm_sync_bucket_mb=1,
        vllm_max_logprob_gap=max_gap,
        vllm_engine_kwargs={"enforce_eager": True, "max_num_batched_tokens": 64},
        report_to="none",
    )
    topology = read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None, env={})
    engine_model = EngineModel(path=str(tiny_model), tokenizer=str(tiny_model), revision=None, dtype=dtype)
    watch = FailureWatch(None, node=0, rank=0, host="here", local_pids={})
    engines = StartingEngines(
        engine_spec(args, engine_model, topology),
        topology,
        watch,
        log_folder=output_dir / "logs",
        attempt=0,
        timeout_s=args.vllm_start_timeout,
    )
    trained = TrainedModel(model=model, engine_model=engine_model)
    local = LocalVLLM(args, engines, trained, NodeGroups(topology, max_wait_s=60), watch, progress)
    yield local
    local.close()
    for client in engines.clients:
        assert not session_members(client.pid)
        assert not client._private_folder.exists()


@pytest.fixture(scope="module")
def local(
    tiny_model: Path, model: torch.nn.Module, progress: Progress, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalVLLM]:
    with started(tiny_model, model, progress, tmp_path_factory.mktemp("engine")) as engine:
        engine.sync_weights()
        yield engine


@pytest.fixture
def fresh(tiny_model: Path, model: torch.nn.Module, progress: Progress, tmp_path: Path) -> Iterator[LocalVLLM]:
    """An engine of its own: one that has refused a push is ended."""
    with started(tiny_model, model, progress, tmp_path) as engine:
        yield engine


def disturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def sampled_gap(model: torch.nn.Module, prompts: list[list[int]], completions: list, logprobs: list) -> float:
    """Largest difference between the engine's log-probabilities of its samples and a forward of the model."""
    worst = 0.0
    for prompt, completion, engine in zip(prompts, completions, logprobs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
        worst = max(worst, (ours - torch.tensor(engine).squeeze(-1)).abs().max().item())
    return worst


PROMPTS = [[5, 6, 7]] * 3 + [[8, 9]] * 2 + [[5, 6, 7, 8, 9, 10]]


def test_pushes_are_right_after_large_changes(local: LocalVLLM, model: torch.nn.Module, progress: Progress) -> None:
    for step in range(3):
        progress.step = step
        disturb(model, step)
        local.sync_weights()
        _, completions, logprobs, _ = local.generate(PROMPTS, None, 1)
        assert sampled_gap(model, PROMPTS, completions, logprobs) < 1e-3
        assert local.policy_version == step
        assert local.last_push is not None
        assert local.last_push.gap is not None
        assert local.last_push.gap.max < 1e-3
        assert local.engines.clients[0].call("weight_version", 10) == str(step)


def test_samples_differ_and_a_repeated_step_repeats_them(local: LocalVLLM, progress: Progress) -> None:
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


def test_prompts_that_do_not_fit_one_step(local: LocalVLLM, model: torch.nn.Module) -> None:
    """A step takes 64 tokens: vLLM would cut the second prompt in two, and die of its seed."""
    prompts = [[5 + row] * 40 for row in range(4)]
    _, completions, logprobs, _ = local.generate(prompts, None, 1)
    assert sampled_gap(model, prompts, completions, logprobs) < 1e-3


def test_no_rows_and_a_long_prompt(local: LocalVLLM) -> None:
    assert local.generate([], None, 1)[1] == []
    with pytest.raises(JobFailed, match=r"row 1 .*48"):
        local.generate([[5, 6], [5] * 48], None, 1)
    _, completions, _, _ = local.generate([[5] * 46], None, 1)
    assert len(completions[0]) <= 2  # cut at the engine's length


def test_wrong_values_are_refused_and_the_engine_ended(
    local: LocalVLLM, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last of those that share an engine."""
    fill = GatheredSource.fill

    def wrong(self: GatheredSource, bucket: Bucket, places: list[torch.Tensor]) -> None:
        fill(self, bucket, places)
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name.endswith("0.self_attn.v_proj.weight"):
                place.copy_(torch.roll(place, 1, 0))

    monkeypatch.setattr(GatheredSource, "fill", wrong)
    progress.step = 20
    pid = local.engines.clients[0].pid
    with pytest.raises(JobFailed, match=r"differ by [\d.]+ in the mean .* the mean is 0.0001 .* after a first gap"):
        local.sync_weights()
    assert not session_members(pid)


def test_a_missing_parameter_is_named(fresh: LocalVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the trainer says, wrongly, that it is frozen, and though an earlier push has brought it."""
    fresh.sync_weights()
    plan = GatheredSource.plan

    def without_a_v_proj(self: GatheredSource) -> PushPlan:
        kept = "model.layers.1.self_attn.v_proj.weight"
        buckets = []
        for bucket in plan(self).buckets:
            parameters = tuple(pair for pair in bucket.parameters if pair[0] != kept)
            buckets.append(Bucket(parameters=parameters, metas=tuple(m for m in bucket.metas if m.name != kept)))
        return PushPlan(buckets=tuple(buckets), held=(kept,))

    monkeypatch.setattr(GatheredSource, "plan", without_a_v_proj)
    with pytest.raises(
        JobFailed, match=r"layers\.1\.self_attn\.qkv_proj: \d+ of \d+ elements arrived, none from .*v_proj"
    ):
        fresh.sync_weights()


# Of the first layer all but one norm is frozen, as is the embedding; of the second, a part of a fused layer.
FROZEN_WHOLE = ("embed_tokens", "layers.0.self_attn", "layers.0.mlp", "layers.0.input_layernorm")
FAR = 5e-3  # a stale or missing tensor shows as 0.1 up
FROZEN_PARTS = ("layers.1.self_attn.k_proj", "layers.1.self_attn.q_proj.bias", "layers.1.mlp.gate_proj")


def balance(model: torch.nn.Module) -> None:
    """What code that balances experts does between two pushes, at its largest: other experts are chosen now."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.roll(buffer, 3))


@pytest.mark.parametrize("family", ["qwen2-tied", "llama-untied", "qwen3-moe", "glm4-moe"])
def test_frozen_layers_stay_behind_and_the_engine_stays_right(family: str, tmp_path: Path) -> None:
    """Tied (with biases), untied, experts, experts with a router's bias.

    A large change of what is trained before every one of five pushes, and of the router's bias, which travels though
    the router is frozen.
    """
    path = save_tiny_model(family, tmp_path / family)
    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    progress = Progress()

    def train() -> None:
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)

    def push_and_prove() -> int:
        train()
        balance(trained)
        progress.step += 1
        local.sync_weights()
        assert local.last_push is not None
        assert local.last_push.gap is not None
        assert local.last_push.gap.max < FAR
        return local.last_push.num_bytes

    with started(path, trained, progress, tmp_path / "engine", max_gap=FAR) as local:
        everything = push_and_prove()
        train()  # and frozen only then: what was pushed is not what stays
        for name, parameter in trained.named_parameters():
            parameter.requires_grad_(not any(part in name for part in (*FROZEN_WHOLE, *FROZEN_PARTS)))
        stays = sum(
            parameter.numel() * 4
            for name, parameter in trained.named_parameters()
            if any(part in name for part in FROZEN_WHOLE)
        )
        assert 0 < stays < everything
        assert [push_and_prove() for _ in range(3)] == [everything, everything - stays, everything - stays]
        trained.requires_grad_(True)
        assert push_and_prove() == everything


def test_a_router_keeps_float32_in_a_bfloat16_engine(tmp_path: Path) -> None:
    path = save_tiny_model("glm4-moe", tmp_path / "model")
    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    progress = Progress()
    with started(path, trained, progress, tmp_path / "engine", dtype=torch.bfloat16) as local:
        for step in range(2):
            balance(trained)
            progress.step = step
            local.sync_weights()
            assert local.last_push is not None
            assert local.last_push.gap is not None
            assert local.last_push.gap.mean < 0.01
        assert local._serving is not None
        source = local._serving.pusher.source
        in_float32 = {meta.name for meta in source.plan().metas if meta.dtype == torch.float32}
        router = ("weight", "e_score_correction_bias")
        assert in_float32 == {f"model.layers.{layer}.mlp.gate.{name}" for layer in range(2) for name in router}
        wire_format = WireFormat(whole_experts=tuple(stack.name for stack in source.experts))
        source.adopt(wire_format)  # a trainer that takes all for bfloat16
        with pytest.raises(JobFailed, match=r"gate\.\w+ was sent in torch.bfloat16, but .* holds it in torch.float32"):
            local.sync_weights()
