"""The proof of a push: engine and trainer score the same tokens.

Sampled tokens' log-probabilities cannot serve: vLLM takes them after top-p, penalties and masks. `prompt_logprobs` are
raw, so a fixed probe of random tokens is scored by one forward on each side.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from grpo.engine.like import EngineLike
from grpo.weights.report import LogprobGap

PROBE_PROMPTS = 4
PROBE_TOKENS = 32

# Mean absolute gap of natural-log probabilities above which a push is refused. Rounding explains far less: kernels
# differ in the order of sums, by about 1e-6 in float32 and 2e-2 in bfloat16; a stale or missing tensor shows as 0.1 up.
MEAN_GAP_LIMITS = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}

# These are made for any model: one may stay far below, and a tensor that goes stale later would hide under the limit.
# What rounding costs with this model and these kernels shows in the first proved push, and later ones are held to a
# multiple of it, which leaves room for a policy that sharpens. It only tightens: were the first push bad, its own gap
# would become the measure. And not without end: a proof that ends good runs is as bad as none.
FIRST_GAP_FACTOR = 5.0
LEAST_SHARE = 0.1  # of the dtype's limit


@dataclass(slots=True, kw_only=True, eq=False)
class Prover:
    """Proves pushes. Every rank has one; `prove` is collective, as the trainer's forward is under ZeRO-3."""

    model: nn.Module
    clients: Sequence[EngineLike]
    """The node's engines on its local main; none on every other rank."""
    probe: list[list[int]]
    """See `probe_prompts`; the same on every rank."""
    dtype: torch.dtype
    """Of the engines."""
    asked_limit: float | None
    """The user's `vllm_max_logprob_gap`."""
    autocast: Callable[[], contextlib.AbstractContextManager]
    """Makes the context in which the trainer runs its forwards."""
    cast_lm_head_to_fp32: bool
    timeout_s: float
    """Of an engine's answer."""
    first_gap: LogprobGap | None = None
    """Of the first push, which is always proved; the worst engine's of the job."""

    @property
    def limit(self) -> float:
        """Of the mean gap in the next proof."""
        return gap_limit(self.dtype, asked=self.asked_limit, first=self.first_gap)

    @property
    def first_limit(self) -> float:
        """Of the first push, before it is known what rounding costs."""
        return gap_limit(self.dtype, asked=self.asked_limit, first=None)

    def prove(self, push_number: int, *, engines_work: bool, limit: float | None = None) -> LogprobGap | None:
        """Score the probe on both sides.

        Args:
            engines_work: whether this node's engines have taken the push; if not, they are not asked.
            limit: of the mean gap; None: the present one.

        Returns:
            The worst gap of this node's engines; None where none was asked.

        Raises:
            EngineError: an engine did not answer, or does not compute what the trainer does.
            FloatingPointError: on every rank; there is nothing that an engine could be held to.
        """
        expected = self.trainer_logprobs()
        if not np.isfinite(expected).all():
            raise FloatingPointError(
                f"the trainer's own log-probabilities are not finite in push {push_number}: its weights hold NaN or "
                "infinity, training has diverged; a lower learning_rate or max_grad_norm may keep it from that"
            )
        if not engines_work or not self.clients:
            return None
        gaps, limit = [], self.limit if limit is None else limit
        for client in self.clients:
            scored = client.call("prompt_logprobs", self.timeout_s, prompts=self.probe)
            gaps.append(gap := gap_between(scored, expected))
            if gap.mean > limit:
                first = f" after a first gap of {self.first_gap.mean:.3g}" if self.first_gap else ""
                raise client.error(
                    f"does not compute what the trainer does after push {push_number} [GRPO-504]: log-probabilities "
                    f"of the same tokens differ by {gap.mean:.3g} in the mean and {gap.max:.3g} at most, the limit of "
                    f"the mean is {limit:.3g} for {self.dtype}{first}; vllm_max_logprob_gap sets another"
                )
        return max(gaps, key=lambda gap: gap.mean)

    def trainer_logprobs(self) -> np.ndarray:
        """Of the probe, as it is trained now; see the function. Collective under ZeRO-3."""
        return trainer_logprobs(self.model, self.probe, self.autocast(), cast_lm_head_to_fp32=self.cast_lm_head_to_fp32)


def probe_prompts(vocab_size: int, max_model_len: int, special_ids: Collection[int] = ()) -> list[list[int]]:
    """The probe: `PROBE_PROMPTS` lists of up to `PROBE_TOKENS` ordinary token ids, the same in every run."""
    ordinary = np.setdiff1d(np.arange(vocab_size), np.fromiter(special_ids, dtype=np.int64, count=len(special_ids)))
    length = min(PROBE_TOKENS, max_model_len - 1)
    return np.random.default_rng(0).choice(ordinary, size=(PROBE_PROMPTS, length)).tolist()


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
    prompts: list[list[int]],
    autocast: contextlib.AbstractContextManager,
    *,
    cast_lm_head_to_fp32: bool = False,
) -> np.ndarray:
    """Log-probability of each probe token but the first, by the trainer. [P, L-1] float32.

    Takes the way that training takes: backbone, then the head's weight gathered by itself. A forward through the head's
    module would be recorded by ZeRO-3, which then prefetches the head in training, where TRL gathers it: "Cannot
    partition a param in flight" (DeepSpeed 0.19, TRL 1.16, untied heads).

    Collective under ZeRO-3, whose forward gathers: every rank calls it.
    """
    was_training = model.training
    model.eval()  # no dropout
    try:
        token_ids = torch.tensor(prompts, device=next(model.parameters()).device)
        with _scoring_at_temperature_1(model, cast_lm_head_to_fp32), autocast:
            scored = model(
                input_ids=token_ids, attention_mask=torch.ones_like(token_ids), labels=token_ids, fused_lm_head=True
            )
        return scored.log_probs.float().cpu().numpy()
    finally:
        model.train(was_training)


def gap_between(engine: list[list[float]], trainer: np.ndarray) -> LogprobGap:
    """The gap over all probe tokens; a NaN counts as infinite."""
    difference = np.nan_to_num(np.abs(np.asarray(engine, dtype=np.float64) - trainer), nan=np.inf)
    return LogprobGap(mean=float(difference.mean()), max=float(difference.max()))


def gap_limit(dtype: torch.dtype, *, asked: float | None, first: LogprobGap | None) -> float:
    """The mean gap, in nats, above which a push is refused.

    Args:
        dtype: of the engine.
        asked: the user's `vllm_max_logprob_gap`, which alone can loosen the limit, and stands as it is.
        first: of the first proved push; None for that push itself.
    """
    if asked is not None:
        return asked
    limit = MEAN_GAP_LIMITS[dtype]
    return limit if first is None else min(limit, max(FIRST_GAP_FACTOR * first.mean, LEAST_SHARE * limit))


def is_due(push_number: int) -> bool:
    """Whether the `push_number`-th push, counted from 1, is proved: the first ten, then every tenth."""
    return push_number <= 10 or push_number % 10 == 0
