"""A real engine beside a model in the test's own process, without ranks."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import GRPOConfig
from grpo.config.models import AdapterSlot, EngineModel
from grpo.engine.supervisor import EngineSupervisor
from grpo.faults.sessions import session_members
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.local_vllm import LocalVLLM
from grpo.place.topology import read_topology
from grpo.serving import engine_spec
from grpo.weights.adapters import Lora
from grpo.weights.buckets import Bucket
from grpo.weights.source import GatheredSource
from grpo.weights.trained import TrainedModel

END_TOKENS = (1, 7)
"""The tiny models' own, and another one, which the engine knows from the trainer alone."""


class Progress:
    """The optimizer step, as a test wants it."""

    step = 0
    mode = "train"

    def __call__(self) -> tuple[int, str, int]:
        return self.step, self.mode, self.step


@contextlib.contextmanager
def started(
    tiny_model: Path,
    model: torch.nn.Module,
    progress: Progress,
    output_dir: Path,
    dtype: torch.dtype = torch.float32,
    max_gap: float | None = None,
    lora: Lora | None = None,
    slot: AdapterSlot | None = None,
    device: str | None = None,
    **settings: Any,
) -> Iterator[LocalVLLM]:
    """With weights in shared memory.

    Args:
        device: the engine's, a value for CUDA_VISIBLE_DEVICES; None: it computes on CPU.
        settings: other ones of `GRPOConfig`.
    """
    args = GRPOConfig(
        **{
            "output_dir": str(output_dir),
            "use_cpu": True,
            "bf16": False,
            "max_completion_length": 12,
            "vllm_max_model_length": 48,
            "vllm_sync_bucket_mb": 1,
            "vllm_max_logprob_gap": max_gap,
            "vllm_engine_kwargs": {"enforce_eager": True, "max_num_batched_tokens": 64},
            "report_to": "none",
            **settings,
        }
    )
    topology = read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None, env={})
    if device is not None:
        topology = replace(topology, engines=((device,),))
    engine_model = EngineModel(path=str(tiny_model), tokenizer=str(tiny_model), revision=None, dtype=dtype)
    watch = FailureWatch(None, node=0, rank=0, host="here")
    engines = EngineSupervisor(
        engine_spec(args, engine_model, topology, slot),
        topology,
        watch,
        log_folder=output_dir / "logs",
        attempt=0,
        timeout_s=args.vllm_start_timeout,
    )
    trained = TrainedModel(model=model, engine_model=engine_model, end_tokens=END_TOKENS, lora=lora)
    local = LocalVLLM(args, engines, trained, NodeGroups(topology, max_wait_s=60), watch, progress)
    yield local
    local.close()
    for client in engines.clients:
        assert not session_members(client.pid)
        assert not client.private_folder.exists()


def turn_a_v_proj(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the rows of one weight are sent in another place than their own."""
    fill = GatheredSource.fill

    def wrong(self: GatheredSource, bucket: Bucket, places: list[torch.Tensor]) -> None:
        fill(self, bucket, places)
        for meta, place in zip(bucket.metas, places, strict=True):
            if meta.name.endswith("0.self_attn.v_proj.weight"):
                place.copy_(torch.roll(place, 1, 0))

    monkeypatch.setattr(GatheredSource, "fill", wrong)


def sampled_gap(model: torch.nn.Module, prompts: list[list[int]], completions: list, logprobs: list) -> float:
    """Largest difference between the engine's log-probabilities of its samples and a forward of the model."""
    worst = 0.0
    for prompt, completion, engine in zip(prompts, completions, logprobs, strict=True):
        with torch.no_grad():
            token_ids = torch.tensor([prompt + completion], device=model.device)
            logits = model(input_ids=token_ids).logits[0, len(prompt) - 1 : -1].float()
        ours = logits.log_softmax(-1).gather(-1, token_ids[0, len(prompt) :, None]).squeeze(-1).cpu()
        worst = max(worst, (ours - torch.tensor(engine).squeeze(-1)).abs().max().item())
    return worst


PROMPTS = [[5, 6, 7]] * 3 + [[8, 9]] * 2 + [[5, 6, 7, 8, 9, 10]]
