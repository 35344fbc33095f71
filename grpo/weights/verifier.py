"""Verification of a weight sync: engine and trainer score the same tokens."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from grpo.engine.answers import other_expansion
from grpo.engine.like import EngineLike
from grpo.faults.failure import FailureKind
from grpo.model.picture_probe import PictureProbe
from grpo.weights.limits import GapVerdict, gap_between, judge, rounding_limit, tight_limit
from grpo.weights.positions import NUM_PADS, make_padding_harmless
from grpo.weights.probe import trainer_logprobs
from grpo.weights.report import LogprobGap

_log = logging.getLogger(__name__)

_STATEMENTS = {
    GapVerdict.REFUSE: "does not compute what the trainer does after weight sync {number} [GRPO-504]",
    GapVerdict.SEND_AGAIN: "is further from the trainer after weight sync {number} than rounding explains",
    GapVerdict.WARN: "is further from the trainer than at first, and still is after weight sync {number}, which sent "
    "the whole model once more [GRPO-509]",
    GapVerdict.END: "does not compute what the trainer does, nor after weight sync {number}, which sent the whole "
    "model once more [GRPO-508]",
}


@dataclass(slots=True, kw_only=True, eq=False)
class Verifier:
    """Verifies weight syncs. Every rank has one; `verify` is collective, as the trainer's forward is under ZeRO-3."""

    model: nn.Module
    clients: Sequence[EngineLike]
    """Engines of the node on its local main; empty on every other rank."""
    probe: list[list[int]]
    """Token ids from `probe_prompts`; the same on every rank."""
    dtype: torch.dtype
    """Dtype of the engines."""
    asked_limit: float | None
    """`vllm_max_logprob_gap`, set by the user."""
    autocast: Callable[[], contextlib.AbstractContextManager]
    """Makes the context for the trainer's forwards."""
    cast_lm_head_to_fp32: bool
    timeout_s: float
    """Deadline of an engine's answer."""
    largest: Callable[[float], float]
    """Maximum of a number over all ranks; collective."""
    on_gpus: bool = False
    has_routers: bool = False
    """The model routes tokens to experts."""
    reference: nn.Module | None = None
    """Another model TRL scores with, unwrapped."""
    pictures: PictureProbe | None = None
    """Probe with images, if prompts have some: verifies the towers."""
    first_gap: LogprobGap | None = None
    """Gap of the first weight sync, which is always verified; of the job's worst engine."""
    _knows_padding: bool = field(default=False, init=False)

    @property
    def hard_limit(self) -> float:
        """Limit in any verification: the user's, or the gap explained by rounding in any model."""
        return rounding_limit(self.dtype, on_gpus=self.on_gpus) if self.asked_limit is None else self.asked_limit

    @property
    def tight_limit(self) -> float | None:
        """Limit in verifications after the first one; None before that."""
        return None if self.first_gap is None else tight_limit(self.hard_limit, self.first_gap)

    @property
    def limit(self) -> float:
        """Limit in the next verification."""
        return self.hard_limit if self.tight_limit is None else self.tight_limit

    def verify(self, sync_number: int, *, engines_work: bool) -> tuple[LogprobGap, EngineLike] | None:
        """Score the probe on both sides; the first time, also check that padding does not change the trainer's scores.

        Args:
            engines_work: this node's engines have received the weights; otherwise they are not called.

        Returns:
            The worst gap of this node's engines, and that engine; None if no engine was called.

        Raises:
            EngineError: an engine did not answer.
            FloatingPointError: on every rank; the trainer's own log-probabilities are not finite.
            ValueError: on every rank; see `make_padding_harmless`.
        """
        expected = self.trainer_logprobs()
        of_pictures = self._picture_logprobs()
        if not (np.isfinite(expected).all() and np.isfinite(of_pictures).all()):
            raise FloatingPointError(
                f"the trainer's own log-probabilities are not finite in weight sync {sync_number}: its weights hold "
                "NaN or infinity, training has diverged; a lower learning_rate or max_grad_norm may keep it from that"
            )
        if not self._knows_padding:
            models = [self.model] if self.reference is None else [self.model, self.reference]
            limit = rounding_limit(self._own_dtype(), on_gpus=self.on_gpus)
            make_padding_harmless(models, lambda: self._apart_by_padding(expected, of_pictures), limit)
            self._knows_padding = True
            self._warn_of_blind_pictures(of_pictures, limit)
        if not engines_work or not self.clients:
            return None
        found: list[tuple[LogprobGap, EngineLike]] = []
        for client in self.clients:
            scored = client.call("prompt_logprobs", self.timeout_s, prompts=self.probe)
            found.append((gap_between(scored, expected, has_routers=self.has_routers), client))
            if self.pictures is not None:
                found.append((self._picture_gap(client, of_pictures), client))
        return max(found, key=lambda each: each[0].judged)

    def judge(self, gap: LogprobGap, *, limit: float | None = None, was_sent_again: bool) -> GapVerdict:
        """Decide by a gap; see the function `judge`.

        Args:
            limit: instead of the verifier's own; beyond it the gap is refused.
        """
        if limit is not None:
            return judge(gap.judged, hard=limit, tight=None, was_sent_again=was_sent_again)
        return judge(gap.judged, hard=self.hard_limit, tight=self.tight_limit, was_sent_again=was_sent_again)

    def statement(self, verdict: GapVerdict, gap: LogprobGap, sync_number: int, *, limit: float | None = None) -> str:
        """Statement about an engine, to follow its name."""
        of = f"the limit is {self.limit if limit is None else limit:.3g} for {self.dtype}"
        if limit is None and self.first_gap is not None:
            of += f" after a first gap of {self.first_gap.judged:.3g}, and from {self.hard_limit:.3g} on the job ends"
        what = _STATEMENTS[verdict].format(number=sync_number)
        tokens = "the same tokens behind an image" if gap.behind_image else "the same tokens"
        return f"{what}: log-probabilities of {tokens} differ by {gap}, {of}; vllm_max_logprob_gap sets another"

    def trainer_logprobs(self, num_pads: int = 0) -> np.ndarray:
        """Trainer's log-probabilities of the probe; see the function. Collective under ZeRO-3."""
        return self._scored({"input_ids": torch.tensor(self.probe)}, num_pads)

    def _picture_logprobs(self, num_pads: int = 0) -> np.ndarray:
        """Log-probabilities of the tokens after each image, [pictures, tokens] float32. Collective under ZeRO-3."""
        if self.pictures is None:
            return np.empty((0, 0), np.float32)
        return self._scored(self.pictures.inputs, num_pads)[:, -self.pictures.num_scored :]

    def _scored(self, inputs: Mapping[str, torch.Tensor], num_pads: int) -> np.ndarray:
        return trainer_logprobs(
            self.model,
            inputs,
            self.autocast(),
            cast_lm_head_to_fp32=self.cast_lm_head_to_fp32,
            num_pads=num_pads,
        )

    def _picture_gap(self, client: EngineLike, expected: np.ndarray) -> LogprobGap:
        assert self.pictures is not None
        pictures = [*self.pictures.pictures]
        prompts = [self.pictures.token_ids] * len(pictures)
        scored = client.call("prompt_logprobs", self.timeout_s, prompts=prompts, pictures=pictures)
        wanted = self.pictures.inputs["input_ids"].shape[1]
        if (held := len(scored[0]) + 1) != wanted:
            raise client.error(f"cannot be verified with pictures: {other_expansion(held, wanted)}", FailureKind.USER)
        behind = [row[-self.pictures.num_scored :] for row in scored]
        return replace(gap_between(behind, expected, has_routers=self.has_routers), behind_image=True)

    def _warn_of_blind_pictures(self, found: np.ndarray, limit: float) -> None:
        """Warn if two images give the same scores: then no gap shows errors in the weights of the engine's towers."""
        if len(found) and (apart := float(np.abs(found[0] - found[1]).max())) <= limit:
            _log.warning(
                "WARNING: two different pictures change the log-probabilities of a verification by %.2g nats, no more "
                "than rounding (%.2g): it cannot show whether an engine's towers hold the trainer's weights",
                apart,
                limit,
            )

    def _apart_by_padding(self, expected: np.ndarray, of_pictures: np.ndarray) -> float:
        mine = gap_between(self.trainer_logprobs(NUM_PADS).tolist(), expected, has_routers=self.has_routers).judged
        if self.pictures is not None:
            padded = self._picture_logprobs(NUM_PADS).tolist()
            mine = max(mine, gap_between(padded, of_pictures, has_routers=self.has_routers).judged)
        return self.largest(mine)

    def _own_dtype(self) -> torch.dtype:
        """Compute dtype of the trainer's forwards."""
        parameter = next(self.model.parameters())
        with self.autocast():
            is_cast = torch.is_autocast_enabled(parameter.device.type)
            return torch.get_autocast_dtype(parameter.device.type) if is_cast else parameter.dtype


def is_due(sync_number: int) -> bool:
    """True if weight sync number `sync_number`, counted from 1, is verified: the first ten, then every tenth."""
    return sync_number <= 10 or sync_number % 10 == 0
