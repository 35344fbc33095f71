"""The page of options, from `GRPOConfig` itself: `python -m tools.options_page` writes docs/options.md."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl

from grpo.config import GRPOConfig
from grpo.config.checks import OTHER_POLICY_KEYS, OWN_ENGINE_KEYS
from tools.markdown import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
OURS = {field.name: field for field in dataclasses.fields(GRPOConfig)}
THEIRS = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}

# TRL's settings that local mode refuses, as users write them. What the page says of them is the error's own text.
REFUSED: dict[str, Any] = {
    "vllm_server_base_url": "http://node0:8000",
    "vllm_server_host": "node0",
    "vllm_server_port": 9000,
    "vllm_server_timeout": 60.0,
    "vllm_group_port": 50000,
    "vllm_enable_sleep_mode": True,
    "use_transformers_continuous_batching": True,
    "fsdp": True,
    "ds3_gather_for_generation": False,
}

# TRL's vllm_* fields that local mode takes as they are.
USED = {
    "vllm_tensor_parallel_size": "GPUs of one engine; `vllm_reserved_gpus` is a multiple of it",
    "vllm_max_model_length": "prompt and completion together, in tokens; what the engine takes at most",
    "vllm_model_impl": "passed to the engines",
    "vllm_structured_outputs_regex": "passed to the engines with every request",
    "vllm_importance_sampling_correction": "by TRL's loss; stays on with `generation_lookahead`; off by `old_logprobs`",
    "vllm_importance_sampling_cap": "TRL's older name of `vllm_importance_sampling_clip_max`",
    "vllm_importance_sampling_clip_min": "by TRL's loss",
    "vllm_importance_sampling_clip_max": "by TRL's loss",
}

# What has to fit a machine without a GPU, and would be warned of.
_QUIET: dict[str, Any] = {"report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False}

HEAD = """# Options

Set a field of `GRPOConfig` as a keyword in Python, as a flag of `train.py` (`--generation_lookahead 1`) or as a key of
a YAML file. You have all of TRL's own fields, too; look for them in its documentation. [Choosing GPUs and
settings](choosing.md) has values to start with. These tables are written from the code (`python -m
tools.options_page`).
"""


def page() -> str:
    ours = [[f"`{name}`", shown(OURS[name].default), text(OURS[name])] for name in OURS if name not in THEIRS]
    changed = [
        [f"`{name}`", shown(OURS[name].default), shown(THEIRS[name].default), text(OURS[name])] for name in overridden()
    ]
    used = [[f"`{name}`", shown(OURS[name].default), meaning] for name, meaning in USED.items()]
    refused = [[f"`{name}`", f"`{value!r}`", refusal(name, value)] for name, value in REFUSED.items()]
    keys = [[f"`{key}`", instead] for key, instead in OWN_ENGINE_KEYS.items()]
    parts = [
        HEAD,
        "## Fields that TRL does not have",
        table(["field", "default", "meaning"], ours),
        "## TRL's fields that behave otherwise",
        table(["field", "default", "in TRL", "meaning"], changed),
        "## TRL's fields of vLLM that stay as they are",
        table(["field", "default", "meaning"], used),
        '## TRL\'s fields that `vllm_mode="local"` refuses',
        table(["field", "for example", "what it says"], refused),
        "## Keys that `vllm_engine_kwargs` refuses",
        table(["key", "set instead"], keys),
        "And those that would make the engine another policy than the trained one:",
        table(["key", "why not, and what to do"], [[f"`{key}`", why] for key, why in OTHER_POLICY_KEYS.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def overridden() -> Iterator[str]:
    """Fields that TRL has and `GRPOConfig` declares again."""
    return (name for name in GRPOConfig.__annotations__ if name in THEIRS)


def refusal(name: str, value: Any) -> str:
    """What `GRPOConfig` says to it.

    Raises:
        ValueError: it takes it.
    """
    try:
        GRPOConfig(output_dir="runs/options", **_QUIET, **{name: value})
    except ValueError as error:
        return str(error)
    raise ValueError(f"{name}={value!r} is not refused any more: take it out of REFUSED in tools/options_page.py")


def shown(default: Any) -> str:
    return f"`{default:g}`" if isinstance(default, float) else f"`{default!r}`"


def text(field: "dataclasses.Field[Any]") -> str:
    return field.metadata["help"]


if __name__ == "__main__":
    PAGE.write_text(page())
