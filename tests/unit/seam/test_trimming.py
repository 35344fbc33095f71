"""Micro-batches as wide as their rows: each row as if it were alone, rows by their lengths, gradients as before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from grpo import GRPOTrainer
from grpo.engine.messages import Sample
from grpo.seam.trimming import by_length, sorted_in_blocks, trimmed
from tests.support.scripted_trainer import make_trainer, use_scripted_engines
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

FAMILIES = ("llama-untied", "qwen3-tied", "gemma2-tied", "qwen3-moe")
LENGTHS = (9, 30, 1, 17, 64, 3, 40)
PROMPTS = (5, 2, 9, 5, 1, 20, 3)


def padded(order: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows of those prompts and completions, as TRL pads them: ids, mask, and columns of completions."""
    num_prompt, num_completion = max(PROMPTS), max(LENGTHS)
    ids = torch.zeros(len(order), num_prompt + num_completion, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(order):
        tokens = torch.from_numpy(np.random.default_rng(row).integers(2, 40, PROMPTS[row] + LENGTHS[row]))
        columns = slice(num_prompt - PROMPTS[row], num_prompt + LENGTHS[row])
        ids[place, columns], mask[place, columns] = tokens, 1
    return ids, mask, num_completion


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {family: save_tiny_model(family, folder / family) for family in FAMILIES}


@pytest.mark.parametrize("family", [*FAMILIES, "lora"])
def test_logps_of_padded_batch_match_single_rows(
    family: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_scripted_engines(monkeypatch)
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if family == "lora" else None
    options = {"vllm_lora": "merge"} if adapter else {}
    trainer = make_trainer(
        models.get(family, models["qwen3-tied"]), tmp_path / "run", [], peft_config=adapter, **options
    )
    widths: list[tuple[int, ...]] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    def score(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            logps, entropies, _ = trainer._get_per_token_logps_and_entropies(trainer.model, *args, **kwargs)
        return logps if entropies is None else torch.stack([logps, entropies])

    try:
        rows = [*range(len(LENGTHS))]
        alone = []
        for row in rows:
            ids, mask, _ = padded([row])
            kept = mask[0].bool()
            alone.append(score(ids[:, kept], mask[:, kept], LENGTHS[row], compute_entropy=True)[:, 0])
        for order in (rows, rows[::-1], [3, 0, 6, 2, 5, 1, 4]):
            widths.clear()
            found = score(*padded(order), batch_size=2, compute_entropy=True)
            assert found.shape == (2, len(rows), max(LENGTHS))
            for place, row in enumerate(order):
                torch.testing.assert_close(found[:, place, : LENGTHS[row]], alone[row], rtol=0, atol=5e-6)
            # Longest first, in pairs: 65 and 43, 32 and 23, 22 and 14, 10; as wide as prompts and completions need.
            assert widths == [(2, 3 + 64), (2, 20 + 30), (2, 5 + 17), (1, 9 + 1)]
        trainer.args.trim_padding = False
        widths.clear()
        score(*padded(rows), batch_size=2)
        assert {columns for _, columns in widths} == {20 + 64}
    finally:
        trainer.close()


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.of_steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.of_steps.append(torch.cat([each.grad.flatten() for each in kwargs["model"].parameters()]))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_trim_padding_match_padded_rows(
    family: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens_of(sample: Sample, number: int) -> list[int]:
        random = np.random.default_rng(sample.seed + number)
        return random.integers(5, 20, random.integers(1, 40)).tolist()

    def logprobs_of(sample: Sample, tokens: Any) -> list[float]:
        return [-float(np.log(VOCAB_SIZE))] * len(tokens)

    use_scripted_engines(monkeypatch, tokens_of=tokens_of, logprobs_of=logprobs_of)
    gradients, shares = {}, {}
    for trims in (True, False):
        seen, options = Gradients(), {"optim": "sgd", "learning_rate": 0.1, "beta": 0.1, "max_steps": 2}
        options |= {
            "vllm_max_logprob_gap": 1e9,
            "gradient_accumulation_steps": 4,
            "per_device_train_batch_size": 2,
            "max_completion_length": 40,
        }
        trainer = make_trainer(models[family], tmp_path / str(trims), [], trim_padding=trims, **options)
        trainer.add_callback(seen)
        try:
            trainer.train()
        finally:
            trainer.close()
        gradients[trims] = seen.of_steps
        shares[trims] = [line["train/padding_share"] for line in trainer.state.log_history if "kl" in line]
    assert len(gradients[True]) == len(gradients[False]) == 2
    for ours, theirs in zip(gradients[True], gradients[False], strict=True):
        assert theirs.norm() > 0
        assert torch.dist(ours, theirs) < 1e-5 * theirs.norm()
    for less, more in zip(shares[True], shares[False], strict=True):
        assert less < 0.75 * more


def batch_of(lengths: list[int], *, prompt: int = 3, width: int = 12) -> dict[str, Any]:
    """A micro-batch of rows with so many tokens, each of which is the row's own length."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    prompt_mask = torch.ones(len(lengths), prompt, dtype=torch.long)
    prompt_mask[:, 0] = 0
    return {
        "prompt_ids": prompt_mask * 9,
        "prompt_mask": prompt_mask,
        "completion_ids": mask * torch.tensor(lengths)[:, None],
        "completion_mask": mask,
        "advantages": torch.tensor(lengths).float(),
        "importance_sampling_ratio": torch.ones(len(lengths), 1),
        "num_items_in_batch": torch.tensor(7),
        "names": [str(length) for length in lengths],
        "nothing": None,
    }


def lengths_of(batches: list[dict[str, Any]]) -> Iterator[list[int]]:
    for batch in batches:
        yield batch["advantages"].int().tolist()


def test_trimmed_drops_columns_without_tokens() -> None:
    found = trimmed(batch_of([4, 7]))
    assert {name: tuple(each.shape) for name, each in found.items() if isinstance(each, torch.Tensor)} == {
        "prompt_ids": (2, 2),
        "prompt_mask": (2, 2),
        "completion_ids": (2, 7),
        "completion_mask": (2, 7),
        "advantages": (2,),
        "importance_sampling_ratio": (2, 1),
        "num_items_in_batch": (),
    }
    assert found["prompt_mask"].all()
    assert trimmed(batch_of([4, 7]), 8)["completion_mask"].shape == (2, 8)
    assert trimmed(batch_of([4, 7]), 16)["completion_mask"].shape == (2, 12)  # no more than there are
    assert trimmed(batch_of([0, 0]))["completion_mask"].shape == (2, 1)  # as for rows that are all cut off


def test_sorted_in_blocks_orders_rows_by_length_within_each_step() -> None:
    batches = [batch_of(lengths) for lengths in ([1, 8], [3, 12], [2, 4], [11, 5])]
    assert [*lengths_of(sorted_in_blocks(batches, 2))] == [[12, 8], [3, 1], [11, 5], [4, 2]]
    whole = sorted_in_blocks(batches, 4)
    assert [*lengths_of(whole)] == [[12, 11], [8, 5], [4, 3], [2, 1]]
    assert [*lengths_of(sorted_in_blocks(batches, 1))] == [[8, 1], [12, 3], [4, 2], [11, 5]]
    for batch in whole:
        lengths = batch["advantages"].int()
        assert batch["names"] == [str(length) for length in lengths.tolist()]
        assert torch.equal(batch["completion_mask"].sum(1), lengths)
        assert torch.equal(batch["completion_ids"].max(1).values, lengths)
        assert batch["num_items_in_batch"] == 7


def test_by_length_of_equal_rows_keeps_order() -> None:
    assert by_length(torch.tensor([[1, 0], [1, 1], [0, 1], [1, 1]])).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("options", "is_left"),
    [
        ({}, False),
        ({"loss_type": "bnpo"}, True),
        ({"entropy_coef": 0.1}, True),
        ({"entropy_coef": 0.0, "use_adaptive_entropy": True, "entropy_target": 1.0}, True),
        ({"top_entropy_quantile": 0.5}, True),
        ({"model": "qwen3-moe"}, True),  # TRL's default for mixtures
        ({"model": "qwen3-moe", "router_aux_loss_coef": 0.0}, False),
        ({"loss_type": "grpo"}, False),
    ],
)
def test_depends_on_grouping_matches_loss_settings(
    options: dict[str, Any],
    is_left: bool,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_scripted_engines(monkeypatch)
    family = options.get("model", "qwen3-tied")
    options = {name: value for name, value in options.items() if name != "model"}
    trainer = make_trainer(models[family], tmp_path / "run", [], **options)
    trainer.close()
    assert trainer._parts.trimming.depends_on_grouping() is is_left


def test_depends_on_grouping_with_overridden_loss_is_true(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MeanOfTokens(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs)

    use_scripted_engines(monkeypatch)
    trainer = make_trainer(tiny_model, tmp_path / "run", [], kind=MeanOfTokens)
    trainer.close()
    assert trainer._parts.trimming.depends_on_grouping()
