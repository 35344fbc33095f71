"""Every logged step as one JSON object per line, whatever trackers are configured; and what is counted for it."""

import json
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.run.folder import METRICS_FILE


class MetricsFile(TrainerCallback):
    """Appends to `<output_dir>/metrics.jsonl` on global rank 0; `RunFolder` has cut it to the steps that count."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs:
            path = Path(args.output_dir) / METRICS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as lines:
                lines.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def clipped_share(scored: dict[str, Any], args: trl.GRPOConfig, accelerator: Accelerator) -> dict[str, float]:
    """The share of what TRL's importance sampling has clipped or masked, over all ranks. Collective.

    Args:
        scored: a batch, as `_generate_and_score_completions` returns it.
    """
    counts = count_clipped(
        scored["importance_sampling_ratio"],
        scored["completion_mask"],
        mode=args.vllm_importance_sampling_mode,
        clip_min=args.vllm_importance_sampling_clip_min,
        clip_max=args.vllm_importance_sampling_clip_max,
    )
    clipped, counted = accelerator.gather(counts.unsqueeze(0)).sum(0).tolist()
    return {"sampling/importance_sampling_ratio/clipped_share": clipped / max(counted, 1)}


def count_clipped(
    ratio: torch.Tensor, completion_mask: torch.Tensor, *, mode: str, clip_min: float | None, clip_max: float | None
) -> torch.Tensor:
    """What TRL's importance sampling has clipped or masked, and of how many. [2] int64.

    Args:
        ratio: after TRL's correction: [completions, tokens], or [completions, 1] in the modes of whole sequences.
        completion_mask: [completions, tokens], 0 on padding.
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
