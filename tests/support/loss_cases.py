"""What TRL's trainer and ours are to compute alike: a table, for `jobs/losses_job.py` and its test."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NUM_STEPS = 2
MAX_TOKENS = 8

BASE: Mapping[str, Any] = {
    "per_device_train_batch_size": 6,  # on two ranks three groups, the second one on both of them
    "num_generations": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,  # the second step trains on what an older policy has sampled: ratios are not 1
    "max_steps": NUM_STEPS,
    "max_completion_length": MAX_TOKENS,
    "learning_rate": 3e-3,  # the second step's ratios leave every bound
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,  # clipping would hide a factor
    "vllm_max_model_length": 64,
}
"""Options of every case, for either trainer."""

_TOKEN_TRUNCATE = {"vllm_importance_sampling_mode": "token_truncate"}
_TWO_BATCHES = {"steps_per_generation": 1}
_TRIMMED: Mapping[str, Mapping[str, Any]] = {
    **{name: {"loss_type": name} for name in ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo")},
    "vespo": {"loss_type": "vespo", **_TOKEN_TRUNCATE},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.4},
    "entropy_coef": {"entropy_coef": 0.1},
    "mask_truncated_completions": {"mask_truncated_completions": True},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.05},
    "pad_to_multiple_of": {"pad_to_multiple_of": 4},
    "beta": {"beta": 0.1},
    "num_iterations": {"num_iterations": 2},
    "accumulation over two batches": {"gradient_accumulation_steps": 4},
    "two steps for each batch": {"steps_per_generation": 4},
    "lora": {"beta": 0.1},
}
"""What changes the loss, or which micro-batches a step has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration that both trainers train with."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Beside `BASE`, for either trainer."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """For ours alone; they change nothing."""
    trims: bool = False
    """Whether ours computes without padding, rows by their lengths: what is learnt is the same but for rounding."""
    lora: bool = False
    """Whether an adapter is trained."""
    beside: str | None = "plain"
    """The case from which it differs in one thing, which has to show in the gradients; None: there is none."""
    rewards: Literal["function", "model"] = "function"
    data: Literal["rows", "stream"] = "rows"
    sampler: bool = False
    """Whether a subclass has a `_get_train_sampler` of its own."""
    refuses: bool = False
    """Whether engines take no long prompts. TRL's trainer masks such rows as cut off then, and has no reward for them:
    losses and gradients are to be the same, and not what is logged of lengths."""
    spoilt: Literal["", "token", "order"] = ""
    """What is wrong in our trainer's completions: a token, or the order of the log-probabilities."""


CASES: Mapping[str, Case] = {
    "plain": Case(beside=None),  # TRL's loss by default, which is dapo
    **{name: Case(options={"loss_type": name}) for name in ("grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo")},
    "token_truncate": Case(options=_TOKEN_TRUNCATE),
    "vespo": Case(options={"loss_type": "vespo", **_TOKEN_TRUNCATE}, beside="token_truncate"),
    "token_mask": Case(
        options={"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.2}
    ),
    "sequence_truncate": Case(options={"vllm_importance_sampling_mode": "sequence_truncate"}),
    "no importance sampling": Case(options={"vllm_importance_sampling_correction": False}),
    "gspo": Case(options={"loss_type": "grpo", "importance_sampling_level": "sequence"}, beside="grpo"),
    "delta": Case(options={"delta": 1.05}),
    "epsilon_high": Case(options={"epsilon_high": 0.02}),
    "top_entropy_quantile": Case(options={"top_entropy_quantile": 0.4}),
    "mask_truncated_completions": Case(options={"mask_truncated_completions": True}),
    "entropy_coef": Case(options={"entropy_coef": 0.1}),
    "use_adaptive_entropy": Case(
        options={"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 6.5, "entropy_coef_delta": 0.1},
        beside="entropy_coef",
    ),
    "off_policy_mask_threshold": Case(options={"off_policy_mask_threshold": 0.05}),
    "scale_rewards": Case(options={"scale_rewards": "batch"}),
    "beta": Case(options={"beta": 0.1}),
    "use_bias_correction_kl": Case(options={"beta": 0.1, "use_bias_correction_kl": False}, beside="beta"),
    "two batches": Case(options=_TWO_BATCHES),
    "two batches, beta": Case(options={"beta": 0.1, **_TWO_BATCHES}, beside="two batches"),
    "sync_ref_model": Case(
        options={"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, **_TWO_BATCHES},
        beside="two batches, beta",
    ),
    "num_iterations": Case(options={"num_iterations": 2, **_TWO_BATCHES}, beside="two batches"),
    "accumulation": Case(options={"gradient_accumulation_steps": 4}),
    "lookahead": Case(
        options={**_TWO_BATCHES, **_TOKEN_TRUNCATE}, own={"generation_lookahead": 1}, beside="token_truncate"
    ),
    "reward model": Case(rewards="model"),
    "stream": Case(data="stream"),
    "own sampler": Case(sampler=True),
    "refused prompts": Case(options={"beta": 0.1, "mask_truncated_completions": True}, refuses=True),
    **{
        f"trimmed, {name}": Case(
            # Adam would turn the rounding of a small gradient into a step of full size.
            options={"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1, **options},
            trims=True,
            lora=name == "lora",
            own={"vllm_lora": "merge"} if name == "lora" else {},  # no engine is there to try an adapter on
            beside=None if name in ("dapo", "pad_to_multiple_of") else "trimmed, dapo",
        )
        for name, options in _TRIMMED.items()
    },
    "torch_compile": Case(options={"torch_compile": True}),
    "another token": Case(spoilt="token", beside=None),
    "log-probabilities in another order": Case(spoilt="order", beside=None),
}

COMPILED = ("torch_compile",)
UNDER_ZERO3 = ("trimmed, dapo", "trimmed, lora")
