"""Checks of importance sampling and of asynchronous generation: which settings go together."""

from typing import Any


def check_importance_sampling(args: Any) -> None:
    """Check that the correction for off-policy samples fits the loss, and how far ahead batches are sampled.

    Raises:
        ValueError: names the setting and the fix.
    """
    if args.old_logprobs == "engine":
        _check_clip_on_engines(args)
        return
    ahead, mode = args.generation_lookahead, args.vllm_importance_sampling_mode
    if not args.vllm_importance_sampling_correction:
        if ahead:
            raise ValueError(
                f"vllm_importance_sampling_correction is False, but with generation_lookahead {ahead} completions come "
                "from an older policy than the one that is trained: remove it, or set old_logprobs to 'engine', or "
                "generation_lookahead to 0"
            )
        return
    if ahead >= 2 and mode.startswith("sequence"):
        raise ValueError(
            f"vllm_importance_sampling_mode is {mode!r} with generation_lookahead {ahead}: a completion is sampled "
            "under several policies, and the ratio of a whole sequence leaves its bounds almost always: remove it, for "
            "'token_truncate', or set it to 'token_mask'"
        )
    if args.loss_type == "vespo" and mode not in ("token_truncate", "token_mask"):
        raise ValueError(
            f"loss_type 'vespo' needs vllm_importance_sampling_mode 'token_truncate' or 'token_mask', not {mode!r}"
        )


def _check_clip_on_engines(args: Any) -> None:
    from grpo.config.models import samples_as_scored, sampling_settings  # which need GRPOConfig

    if not samples_as_scored(args):
        shaping = ", ".join(f"{name} {value!r}" for name, value in sampling_settings(args).items())
        raise ValueError(
            "old_logprobs is 'engine', but engines sample from another distribution than the trainer's, so that ratios "
            f"are not 1 where the policy has not changed, and the clip acts on one side more than on the other: they "
            f"sample with {shaping}; leave nothing but temperature, or set old_logprobs to 'trainer'"
        )


def check_lookahead(args: Any) -> None:
    """Check `generation_lookahead`, and that rows can be read as far ahead.

    Raises:
        ValueError: names the setting and the fix.
    """
    ahead = args.generation_lookahead
    if not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0:
        raise ValueError(
            f"generation_lookahead is {ahead!r}; it is a whole number of generation batches, 0 or more: 0 is on-policy"
        )
    if not ahead:
        return
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config has {name}, which deals rows out in another order than generation_lookahead "
                "reads them: remove it, or set generation_lookahead to 0"
            )
