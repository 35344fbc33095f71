"""PPO's clip on the engines' log-probabilities: TRL's real loss over engines that sample as the trainer scores."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from grpo import GRPOTrainer
from grpo.engine.messages import Sample
from grpo.rollout import accounts
from grpo.seam.lazy_vllm import TRLTrainer
from grpo.seam.old_logprobs import OldLogprobs
from grpo.weights import delivery
from tests.support.scripted_trainer import make_trainer, use_scripted_engines

BASE: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_batches_a_step": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "two_steps_a_batch": {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "iterations": {"num_iterations": 2},
    "beta": {"beta": 0.1},
    "beta_two_steps_a_batch": {"beta": 0.1, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "lora": {"beta": 0.1, "lora": True, "learning_rate": 0.01},  # larger steps would multiply rounding
    "lora_iterations": {"beta": 0.1, "num_iterations": 2, "lora": True, "learning_rate": 0.01},
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "num_iterations": 2},
    "delta": {"delta": 2.0, "num_iterations": 2},
    "off_policy_mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "entropy": {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    "untrimmed": {"trim_padding": False, "steps_per_generation": 2, "gradient_accumulation_steps": 1},
}


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.of_steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = [each for each in kwargs["model"].parameters() if each.requires_grad]
        self.of_steps.append(torch.cat([each.grad.flatten().double() for each in trained]))


class Run:
    """Trains; engines sample tokens by their seeds, and score them as the trainer does, plus `off`."""

    def __init__(self, tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.folder = tiny_model, folder
        self.off: Callable[[Sequence[int]], np.ndarray] = lambda tokens: np.zeros(len(tokens))
        self.trainer: GRPOTrainer
        self.script = use_scripted_engines(monkeypatch, tokens_of=self._tokens, logprobs_of=self._logprobs)
        self._copy: torch.nn.Module | None = None
        self.before_training = 0
        """Of the policy and its reference: forward passes without a gradient while it is trained."""
        score = TRLTrainer._get_per_token_logps_and_entropies

        def counted(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_training += not torch.is_grad_enabled()
            return score(trainer, *args, **kwargs)

        monkeypatch.setattr(TRLTrainer, "_get_per_token_logps_and_entropies", counted)
        monkeypatch.setattr(delivery, "is_due", lambda sync: False)

    def _tokens(self, sample: Sample, number: int) -> list[int]:
        random = np.random.default_rng(sample.seed + number)
        return random.integers(5, 20, random.integers(1, 5)).tolist()

    @torch.no_grad()
    def _logprobs(self, sample: Sample, tokens: Sequence[int]) -> list[float]:
        prompt, model = sample.token_ids.tolist(), self._copy or self.trainer.model
        scores = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return (scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy() + self.off(tokens)).tolist()

    def make(self, name: str, *, lora: bool = False, **settings: Any) -> GRPOTrainer:
        adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if lora else None
        settings = {**BASE, **({"vllm_lora": "merge"} if lora else {}), **settings}
        self.trainer = make_trainer(self.model, self.folder / name, [], peft_config=adapter, **settings)
        self._copy = None
        if settings.get("generation_lookahead"):  # another thread samples while the trainer's is trained
            self._copy = type(self.trainer.model)(self.trainer.model.config).eval()
            self._copy.load_state_dict(self.trainer.model.state_dict())
        return self.trainer

    def __call__(self, name: str, *, resume: Path | None = None, **settings: Any) -> list[torch.Tensor]:
        """Gradients of the steps."""
        seen, self.before_training = Gradients(), 0
        trainer = self.make(name, **settings)
        trainer.add_callback(seen)
        try:
            trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        finally:
            trainer.close()
        return seen.of_steps

    def logged(self, name: str) -> list[float]:
        return [line[name] for line in self.trainer.state.log_history if name in line]


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tiny_model, tmp_path, monkeypatch)


def assert_alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("case", CASES)
def test_engine_old_logprobs_with_equal_scores_match_trainer_gradients(case: str, run: Run) -> None:
    """And no forward pass but the reference's comes before training."""
    expected = run("trainer", **CASES[case])
    both = run.before_training
    found = run("engine", old_logprobs="engine", **CASES[case])
    assert_alike(found, expected)
    assert both > 0
    assert run.before_training == (both // 2 if "beta" in CASES[case] else 0)
    assert not run.logged("sampling/importance_sampling_ratio/mean")


def leaf_gradients(trainer: GRPOTrainer, batch: dict[str, Any], own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a micro-batch by the policy's log-probabilities `own`, and its gradient by them."""
    own = own.detach().requires_grad_()
    trainer.__dict__["_get_per_token_logps_and_entropies"] = lambda *_, **__: (own, torch.zeros_like(own), None)
    try:
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
    finally:
        del trainer.__dict__["_get_per_token_logps_and_entropies"]
    assert own.grad is not None
    return loss.detach(), own.grad


def test_engine_old_logprobs_clip_matches_ppo_formula(run: Run) -> None:
    """Of a step without a change of weights: ratios are what engines are off by. Against PPO's formula, by token."""
    run.off = lambda tokens: np.resize([0.0, -0.5, 0.5, -0.1], len(tokens))
    run("engine", old_logprobs="engine", max_steps=1, learning_rate=0.0)
    trainer, (batch,) = run.trainer, run.trainer._buffered_inputs
    known, mask = batch["sampling_per_token_logps"], batch["completion_mask"].bool()
    off = torch.tensor([0.0, -0.5, 0.5, -0.1])[: mask.shape[1]].expand_as(known)
    own = known - off
    _, gradient = leaf_gradients(trainer, batch, own)
    advantages = batch["advantages"][:, None].expand_as(own)
    ratio = (own - known).exp()
    beyond = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    expected = torch.where(beyond | ~mask, 0, -ratio * advantages) / batch["num_items_in_batch"]
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    assert (beyond & mask).any()
    assert (~beyond & mask & (ratio > 1.2)).any()
    assert run.logged("clip_ratio/region_mean") == pytest.approx([(beyond & mask).sum().item() / mask.sum().item()])


def test_loss_with_unscored_tokens_leaves_them_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token within a completion, whose followers still see it; and rows whose prompts no engine takes."""
    monkeypatch.setattr(accounts, "MAX_SHARE", 1.0)
    run.off = lambda tokens: np.resize([0.0, np.nan, 0.0, -np.inf], len(tokens))
    run.script.max_model_len = 40
    short, long = "11+11=", "12+12=" * 40
    settings = {"prompts": [short, long] * 2, "vllm_max_model_length": 512, "max_steps": 1, "learning_rate": 0.0}
    for loss_type in ("dapo", "vespo"):
        run(loss_type, old_logprobs="engine", loss_type=loss_type, **settings)
        (batch,) = run.trainer._buffered_inputs
        mask = batch["completion_mask"].bool()
        refused = ~mask.any(1)
        assert refused.sum() == 4
        counted = mask.clone()
        counted[:, 1] = counted[:, 3] = False
        assert (mask & ~counted).any()
        assert batch["num_items_in_batch"] == counted.sum()
        loss, gradient = leaf_gradients(run.trainer, batch, batch["old_per_token_logps"] + 0.01)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        with_advantage = counted & (batch["advantages"] != 0)[:, None]
        assert torch.equal(gradient != 0, with_advantage)
        assert with_advantage.any()


@pytest.mark.parametrize("settings", [CASES["plain"], CASES["two_steps_a_batch"], {"generation_lookahead": 1}])
def test_engine_old_logprobs_log_gap_under_trl_names(settings: dict[str, Any], run: Run) -> None:
    run.off = lambda tokens: 0.1 * np.arange(1, len(tokens) + 1)
    names = [f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max")]
    run("trainer", learning_rate=0.0, max_steps=4, **settings)
    (means, largest), gaps = map(run.logged, names), run.logged("sampling/logprob_gap")
    run("engine", old_logprobs="engine", learning_rate=0.0, max_steps=4, **settings)
    found = [run.logged(name) for name in names]
    if "steps_per_generation" in settings:  # from the first of a batch's two micro-batches, which has half of the rows
        assert [len(values) for values in found] == [2, 2]
        assert all(0.1 <= mean <= most <= 0.4 + 1e-5 for mean, most in zip(*found, strict=True))
        return
    assert found == [pytest.approx(means, abs=1e-5), pytest.approx(largest, abs=1e-5)]
    assert run.logged("sampling/logprob_gap") == pytest.approx(gaps, abs=1e-5)


def test_resume_in_batch_with_changed_old_logprobs_gives_same_gradients(run: Run) -> None:
    """A resume between a batch's two steps, with either and to either."""
    settings = {**CASES["two_steps_a_batch"], "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    settings["seed"] = 3
    for before in ("trainer", "engine"):
        whole = run(before, old_logprobs=before, **settings)
        for after in ("trainer", "engine"):
            rest = run(f"{before}_{after}", old_logprobs=after, resume=run.folder / before / "checkpoint-1", **settings)
            assert_alike(rest, whole[1:])
            assert before != after or torch.equal(rest[0], whole[1])


def test_resume_of_trainer_batch_with_engine_clip_recounts_tokens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MAX_SHARE", 1.0)
    run.off = lambda tokens: np.resize([0.0, np.nan], len(tokens))
    settings = {**CASES["two_steps_a_batch"], "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run("trainer", **settings)
    run("engine", old_logprobs="engine", resume=run.folder / "trainer" / "checkpoint-1", **settings)
    batches = run.trainer._buffered_inputs
    known = [batch["completion_mask"].bool() & batch["sampling_per_token_logps"].isfinite() for batch in batches]
    assert {int(batch["num_items_in_batch"]) for batch in batches} == {sum(int(each.sum()) for each in known)}
    assert all("importance_sampling_ratio" not in batch for batch in batches)


def test_old_logprobs_take_without_logprobs_raises() -> None:
    view: Any = SimpleNamespace(mode="train", state=SimpleNamespace(global_step=0))
    with pytest.raises(ValueError, match=r"rollout_func gives no logprobs: .*old_logprobs to 'trainer'"):
        OldLogprobs(view, clips_on_engines=True).take(
            {"completion_mask": torch.ones(1, 1), "sampling_per_token_logps": None}
        )
