"""`metrics.jsonl`: every logged step as one line of JSON, whatever trackers are configured; some metrics of its own."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.record.files import METRICS_FILE


class MetricsFile(TrainerCallback):
    """Appends to `<output_dir>/metrics.jsonl` on global rank 0; `RunFolder` has cut it at the resumed step.

    Args:
        more: returns fields to put before and after the logged ones.
    """

    def __init__(self, more: Callable[[], tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self._more = more

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if state.is_world_process_zero and logs:
            path = Path(args.output_dir) / METRICS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            first, last = self._more()
            line = {"step": state.global_step, "time": round(time.time(), 3), **first, **logs}
            if "reward" in logs:  # not for the totals at the end
                line |= last
            with path.open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def completion_lengths(scored: dict[str, Any], accelerator: Accelerator) -> dict[str, float]:
    """Quantiles of the completions' lengths, in tokens, over all ranks. Collective.

    Args:
        scored: a batch from `_generate_and_score_completions`; fully masked completions do not count.
    """
    lengths = accelerator.gather(models_tokens(scored).sum(1)).float()
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return {}
    found = torch.quantile(lengths, torch.tensor([0.1, 0.5, 0.9], device=lengths.device)).tolist()
    return {f"completions/length_{name}": value for name, value in zip(("p10", "p50", "p90"), found, strict=True)}


def clipped_share(scored: dict[str, Any], args: trl.GRPOConfig, accelerator: Accelerator) -> dict[str, float]:
    """Share of tokens or sequences clipped or masked by TRL's importance sampling, over all ranks. Collective.

    Args:
        scored: a batch from `_generate_and_score_completions`.
    """
    counts = count_clipped(
        scored["importance_sampling_ratio"],
        models_tokens(scored),
        mode=args.vllm_importance_sampling_mode,
        clip_min=args.vllm_importance_sampling_clip_min,
        clip_max=args.vllm_importance_sampling_clip_max,
    )
    clipped, counted = accelerator.gather(counts.unsqueeze(0)).sum(0).tolist()
    return {"sampling/importance_sampling_ratio/clipped_share": clipped / max(counted, 1)}


def models_tokens(scored: Mapping[str, Any]) -> torch.Tensor:
    """Mask of sampled tokens, without padding and tool results. [completions, tokens] bool.

    Args:
        scored: a batch from `_generate_and_score_completions`.
    """
    mask = scored["completion_mask"].bool()
    return mask & scored["tool_mask"].bool() if scored.get("tool_mask") is not None else mask


def count_clipped(
    ratio: torch.Tensor, completion_mask: torch.Tensor, *, mode: str, clip_min: float | None, clip_max: float | None
) -> torch.Tensor:
    """Count (clipped or masked, all) of TRL's importance sampling. [2] int64.

    Args:
        ratio: after TRL's correction: [completions, tokens], or [completions, 1] in the sequence modes.
        completion_mask: [completions, tokens], 0 on padding and on tool results.
        mode: TRL's `vllm_importance_sampling_mode`.
    """
    if mode.endswith("mask"):
        clipped = ratio == 0
    else:
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
        for bound in (clip_min, clip_max):
            if bound is not None:
                clipped |= ratio == bound
    counted = completion_mask.bool() if mode.startswith("token") else torch.ones_like(clipped)
    return torch.stack([(clipped & counted).sum(), counted.sum()])
