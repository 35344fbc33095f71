"""The probe: tokens scored by engine and trainer to verify a weight sync, and the trainer's scoring.

Log-probabilities of sampled tokens do not work: vLLM takes them after top-p, penalties and masks. `prompt_logprobs` are
raw, so a fixed probe is scored by one forward on each side.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from trl.trainer.utils import add_fused_lm_head

PROBE_PROMPTS = 4
PROBE_TOKENS = 32
NUM_TEXTS = PROBE_PROMPTS // 2
TEXT_TOKENS = NUM_TEXTS * PROBE_TOKENS
"""Most tokens of ordinary text in a probe."""
_VOCABULARY_UNIT = 64  # vLLM rounds the vocabulary up to a multiple before it cuts shards


def probe_prompts(
    vocab_size: int,
    max_model_len: int,
    special_ids: Collection[int] = (),
    *,
    text: Sequence[int] = (),
    num_shards: int = 1,
) -> list[list[int]]:
    """Return `PROBE_PROMPTS` lists of up to `PROBE_TOKENS` token ids, the same in every run and on every rank.

    Half of them are the beginning of `text`, repeated if it is short; its tokens are as likely as in training. The
    others are random, taken from each shard of the vocabulary in turn.

    Args:
        special_ids: excluded from the random ones.
        text: token ids; if empty, all prompts are random.
        num_shards: vocabulary shards of an engine with tensor parallelism.
    """
    ordinary = np.setdiff1d(np.arange(vocab_size), np.fromiter(special_ids, dtype=np.int64, count=len(special_ids)))
    length = min(PROBE_TOKENS, max_model_len - 1)
    texts = NUM_TEXTS if text else 0
    shard_size = -(-vocab_size // _VOCABULARY_UNIT) * _VOCABULARY_UNIT // num_shards
    shards = [found for found in np.split(ordinary, np.searchsorted(ordinary, shard_size * np.arange(1, num_shards)))]
    shards = [shard for shard in shards if len(shard)]  # the last one may contain only padding
    rng = np.random.default_rng(0)
    tokens = [rng.choice(shards[place % len(shards)]) for place in range((PROBE_PROMPTS - texts) * length)]
    random = np.reshape(tokens, (-1, length)).tolist()
    return np.resize(np.asarray(text, np.int64), (texts, length)).tolist() + random


@contextlib.contextmanager
def _scoring_at_temperature_1(model: nn.Module, cast_lm_head_to_fp32: bool) -> Iterator[None]:
    """Bind TRL's scoring forward with temperature 1 in a `with` block; the trainer has bound it with its own
    temperature."""
    bound = model.__dict__.get("forward")
    add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=cast_lm_head_to_fp32)
    try:
        yield
    finally:
        if bound is None:
            del model.forward
        else:
            model.forward = bound


@torch.no_grad()
def trainer_logprobs(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    autocast: contextlib.AbstractContextManager,
    *,
    cast_lm_head_to_fp32: bool = False,
    num_pads: int = 0,
) -> np.ndarray:
    """Log-probability of each probe token except the first, by the trainer. [P, L-1] float32.

    Uses the same path as training: the backbone, then the head's weight gathered separately. With a forward through the
    head's module, ZeRO-3 would record it and prefetch the head in training, where TRL gathers it: "Cannot partition a
    param in flight" (DeepSpeed 0.19, TRL 1.16, untied heads).

    Collective under ZeRO-3, whose forward gathers: every rank calls it.

    Args:
        inputs: of the model's forward: `input_ids` [P, L], and a processor's image inputs.
        num_pads: pads on the left of each prompt, as in TRL.
    """
    was_training = model.training
    model.eval()  # no dropout
    try:
        padding, weight = (num_pads, 0), next(model.parameters())
        token_ids = inputs["input_ids"]
        padded = {"attention_mask": torch.ones_like(token_ids), **inputs}
        for name, tensor in padded.items():
            on_device = tensor.to(weight.device, dtype=weight.dtype if tensor.is_floating_point() else None)
            is_of_tokens = tensor.shape == token_ids.shape
            padded[name] = nn.functional.pad(on_device, padding) if is_of_tokens else on_device
        labels = nn.functional.pad(token_ids.to(weight.device), padding, value=-100)
        with _scoring_at_temperature_1(model, cast_lm_head_to_fp32), autocast:
            scored = model(**padded, labels=labels, fused_lm_head=True)
        return scored.log_probs[:, num_pads:].float().cpu().numpy()
    finally:
        model.train(was_training)
