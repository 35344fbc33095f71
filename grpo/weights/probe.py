"""The tokens that engine and trainer score when a weight sync is verified, and how the trainer scores them.

Sampled tokens' log-probabilities cannot serve: vLLM takes them after top-p, penalties and masks. `prompt_logprobs` are
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
"""Of ordinary text, as many as a probe can take."""
_VOCABULARY_UNIT = 64  # vLLM rounds a vocabulary up to a multiple of it before it cuts it into shards


def probe_prompts(
    vocab_size: int,
    max_model_len: int,
    special_ids: Collection[int] = (),
    *,
    text: Sequence[int] = (),
    num_shards: int = 1,
) -> list[list[int]]:
    """`PROBE_PROMPTS` lists of up to `PROBE_TOKENS` token ids, the same in every run and on every rank.

    Half of them are the beginning of `text`, repeated where it is short, whose tokens are as likely as those of
    training. The others are random: their tokens come from each shard of the vocabulary in turn.

    Args:
        special_ids: left out of the random ones.
        text: token ids; without any all prompts are random.
        num_shards: that an engine's tensor parallelism cuts the vocabulary into.
    """
    ordinary = np.setdiff1d(np.arange(vocab_size), np.fromiter(special_ids, dtype=np.int64, count=len(special_ids)))
    length = min(PROBE_TOKENS, max_model_len - 1)
    texts = NUM_TEXTS if text else 0
    shard_size = -(-vocab_size // _VOCABULARY_UNIT) * _VOCABULARY_UNIT // num_shards
    shards = [found for found in np.split(ordinary, np.searchsorted(ordinary, shard_size * np.arange(1, num_shards)))]
    shards = [shard for shard in shards if len(shard)]  # the last one may hold nothing but what rounds it up
    rng = np.random.default_rng(0)
    tokens = [rng.choice(shards[place % len(shards)]) for place in range((PROBE_PROMPTS - texts) * length)]
    random = np.reshape(tokens, (-1, length)).tolist()
    return np.resize(np.asarray(text, np.int64), (texts, length)).tolist() + random


@contextlib.contextmanager
def _scoring_at_temperature_1(model: nn.Module, cast_lm_head_to_fp32: bool) -> Iterator[None]:
    """TRL's scoring forward, which the trainer has bound with its sampling temperature, bound with 1."""
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
    """Log-probability of each probe token but the first, by the trainer. [P, L-1] float32.

    Takes the way that training takes: backbone, then the head's weight gathered by itself. A forward through the head's
    module would be recorded by ZeRO-3, which then prefetches the head in training, where TRL gathers it: "Cannot
    partition a param in flight" (DeepSpeed 0.19, TRL 1.16, untied heads).

    Collective under ZeRO-3, whose forward gathers: every rank calls it.

    Args:
        inputs: of the model's forward: `input_ids` [P, L], and what a processor has made of pictures.
        num_pads: to the left of each prompt, as TRL pads.
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
