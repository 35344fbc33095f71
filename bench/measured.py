"""What each benchmark measures: which code decides its figures, and whether that has changed since a result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.code_digest import ROOT, digest_of

_SAMPLING = ("grpo/engine", "grpo/rollout", "grpo/local_vllm.py", "grpo/serving.py")
_STEP = (*_SAMPLING, "grpo/groups", "grpo/rewards", "grpo/seam", "grpo/trainer.py", "grpo/weights")

MEASURED: dict[str, tuple[str, ...]] = {
    "weight_sync": ("bench/weight_sync*.py", "grpo/engine", "grpo/weights"),
    "padding": ("bench/padding.py", "grpo/seam/trimming.py", "grpo/trainer.py"),
    "overlap": ("bench/overlap.py", *_STEP),
    "overlap_ragged": ("bench/overlap*.py", *_STEP),
    "dispatch": ("bench/dispatch*.py", "bench/engines.py", "grpo/engine", "grpo/groups", "grpo/rollout"),
    "balance": ("bench/balance.py", "bench/engines.py", "grpo/engine", "grpo/groups", "grpo/rollout"),
    "generate": ("bench/generate.py", "bench/bare_vllm.py", "bench/engines.py", *_SAMPLING),
    "multi_turn": ("bench/multi_turn.py", *_SAMPLING, "grpo/seam/episodes.py"),
    "multi_turn_ahead": ("bench/multi_turn*.py", *_STEP),
    "neighbours": ("bench/neighbours.py", "bench/multi_turn.py", *_SAMPLING, "grpo/seam/episodes.py"),
    "agents": ("bench/agents.py", "bench/multi_turn.py", *_SAMPLING),
    "rewards": ("bench/rewards.py", *_SAMPLING, "grpo/rewards", "grpo/seam/scoring.py"),
    "lora": ("bench/lora.py", "bench/generate.py", "bench/engines.py", *_SAMPLING, "grpo/weights/adapter*.py"),
    "startup": (
        *(f"bench/{name}.py" for name in ("startup", "late_host", "own_script", "serial_start")),
        *_STEP,
        *("train.py", "grpo/config", "grpo/ops/train", "grpo/place", "grpo/preflight"),
    ),
    "save": ("bench/save*.py", "grpo/checkpoints", "grpo/seam/saving.py"),
    "engine_restart": (
        "bench/engine_restart.py",
        "bench/killed_engines.py",
        "bench/engines.py",
        *_SAMPLING,
        "grpo/weights",
    ),
    "timeline": ("bench/timeline.py", "grpo/record/timeline"),
    "watch": ("bench/watch.py", "tests/support/sentinels.py", "grpo/faults"),
    "scale": (
        "bench/scale*.py",
        "grpo/rollout/balance.py",
        "bench/results/overlap*.json",
        "bench/results/weight_sync*.json",
    ),
    "learning": ("bench/learning.py", "train.py", *_STEP, "grpo/ops/train"),
    "spare_groups": ("bench/spare_groups.py", "train.py", *_STEP, "grpo/checkpoints/prompt_order.py", "grpo/ops/train"),
}
"""By benchmark, in the order of the page: files, all of a folder's Python files, and patterns of them. What merely
carries a result (`bench/report.py`) or its settings changes no figure and is left out."""


def code_of(benchmark: str, root: Path = ROOT) -> dict[str, str]:
    """A digest of each part of `MEASURED`, as it stands in the working tree."""
    return {part: digest_of(files_of(part, root), root) for part in MEASURED[benchmark]}


def files_of(part: str, root: Path = ROOT) -> list[Path]:
    """The files that a part of `MEASURED` stands for."""
    return [*((root / part).rglob("*.py") if (root / part).is_dir() else root.glob(part))]


def stamp(result: Mapping[str, Any]) -> str:
    """Of which commit a result of `Report.write` is."""
    return f"commit {result['commit']}" if "commit" in result else "commit unknown"


def staleness(result: Mapping[str, Any], root: Path = ROOT) -> str:
    """A sentence for a result that is older than the code it measures, or that may be; empty for any other one."""
    if "code" not in result:
        return "**The commit of this result was not recorded: the code that it measures may have changed since.**"
    now = code_of(result["benchmark"], root)
    changed = sorted(part for part in now.keys() | result["code"].keys() if now.get(part) != result["code"].get(part))
    if not changed:
        return ""
    return f"**Stale: changed since this was measured: {', '.join(f'`{part}`' for part in changed)}.**"
