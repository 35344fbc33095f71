"""Every logged step as one JSON object per line, whatever trackers are configured; and what is counted for it."""

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
    """Appends to `<output_dir>/metrics.jsonl` on global rank 0; `RunFolder` has cut it to the steps that count.

    Args:
        more: what stands in a line beside the time and what is logged, at its beginning and at its end.
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
            if "reward" in logs:  # and not the totals at the end
                line |= last
            with path.open("a") as lines:
                lines.write(json.dumps(line) + "\n")


def completion_lengths(scored: dict[str, Any], accelerator: Accelerator) -> dict[str, float]:
    """Quantiles of the completions' lengths, in tokens, over all ranks. Collective.

    Args:
        scored: a batch, as `_generate_and_score_completions` returns it; what is masked altogether does not count.
    """
    lengths = accelerator.gather(models_tokens(scored).sum(1)).float()
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return {}
    found = torch.quantile(lengths, torch.tensor([0.1, 0.5, 0.9], device=lengths.device)).tolist()
    return {f"completions/length_{name}": value for name, value in zip(("p10", "p50", "p90"), found, strict=True)}


def clipped_share(scored: dict[str, Any], args: trl.GRPOConfig, accelerator: Accelerator) -> dict[str, float]:
    """The share of what TRL's importance sampling has clipped or masked, over all ranks. Collective.

    Args:
        scored: a batch, as `_generate_and_score_completions` returns it.
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
    """[completions, tokens] bool: what the model has sampled, neither padding nor what a tool said.

    Args:
        scored: a batch, as `_generate_and_score_completions` returns it.
    """
    mask = scored["completion_mask"].bool()
    return mask & scored["tool_mask"].bool() if scored.get("tool_mask") is not None else mask


def count_clipped(
    ratio: torch.Tensor, completion_mask: torch.Tensor, *, mode: str, clip_min: float | None, clip_max: float | None
) -> torch.Tensor:
    """What TRL's importance sampling has clipped or masked, and of how many. [2] int64.

    Args:
        ratio: after TRL's correction: [completions, tokens], or [completions, 1] in the modes of whole sequences.
        completion_mask: [completions, tokens], 0 on padding, and on what tools said.
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
