"""A scripted engine that really samples: from a copy of the trainer's model, which each weight sync renews."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from grpo import GRPOTrainer
from grpo.engine.messages import Sample
from grpo.weights.verifier import trainer_logprobs
from tests.support.engines import Script, agree


class CopiedModel:
    """What the engines of a script hold: the trainer's weights of the last weight sync, in its dtype."""

    def __init__(self, script: Script) -> None:
        self.trainer: GRPOTrainer
        self.stays: Callable[[str], bool] = lambda name: False
        """Parameters that the next weight syncs do not bring."""
        self.verified: list[int] = []
        """Optimizer steps that were done at each verification."""
        self.lengths: Callable[[int], int] = lambda seed: 4
        """Tokens of the completion with this seed."""
        self.off: Callable[[int], np.ndarray] = np.zeros
        """How far the log-probabilities of a completion with so many tokens are from those of the copy."""
        self.sampled: list[int] = []
        """Tokens of every completion, in order."""
        self._model: torch.nn.Module | None = None
        script.control, script.tokens_of, script.logprobs_of = self._control, self._tokens, self._logprobs

    def _control(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method == "finish_weight_update":
            self._renew()
        if method != "prompt_logprobs":
            return agree(method, kwargs)
        assert self._model is not None
        self.verified.append(self.trainer.state.global_step)
        probe = {"input_ids": torch.tensor(kwargs["prompts"])}
        return trainer_logprobs(self._model, probe, contextlib.nullcontext()).tolist()

    @torch.no_grad()
    def _renew(self) -> None:
        if self._model is None:
            trained = self.trainer.model  # a copy of the object would still call its `forward`, which TRL has bound
            self._model = type(trained)(trained.config).to(trained.dtype).eval()
        for (name, own), trained in zip(self._model.named_parameters(), self.trainer.model.parameters(), strict=True):
            if not self.stays(name):
                own.copy_(trained)

    @torch.no_grad()
    def _scores(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[L, V] log-probabilities of what comes after each token."""
        assert self._model is not None
        return self._model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)

    def _tokens(self, sample: Sample, number: int) -> list[int]:
        rng = np.random.default_rng(sample.seed + number)
        tokens: list[int] = []
        for _ in range(self.lengths(sample.seed + number)):
            chances = self._scores([*sample.token_ids.tolist(), *tokens])[-1].exp().double().numpy()
            tokens.append(int(rng.choice(len(chances), p=chances / chances.sum())))
        return tokens

    def _logprobs(self, sample: Sample, tokens: Sequence[int]) -> list[float]:
        prompt = sample.token_ids.tolist()
        scores = self._scores([*prompt, *tokens])[len(prompt) - 1 : -1]
        self.sampled.append(len(tokens))
        return (scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy() + self.off(len(tokens))).tolist()
