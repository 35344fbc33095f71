"""The tokens that a verification scores, and the trainer's own scores of them."""

import contextlib

import numpy as np
import pytest
import torch

from grpo.weights.probe import probe_prompts, trainer_logprobs
from tests.support.tiny_models import VOCAB_SIZE, tiny_model


def test_probe_prompts_are_fixed_without_special_tokens() -> None:
    probe = probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert probe == probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert (len(probe), {len(prompt) for prompt in probe}) == (4, {32})
    assert not {0, 1, 50} & {token for prompt in probe for token in prompt}
    assert {len(prompt) for prompt in probe_prompts(100, 10)} == {9}


def test_probe_prompts_with_text_use_it_for_half() -> None:
    text = list(range(100, 170))
    probe = probe_prompts(1000, 4096, (101,), text=text)
    assert probe[:2] == [text[:32], text[32:64]], "special tokens of a chat template belong to it"
    assert len({tuple(prompt) for prompt in probe}) == 4
    short = probe_prompts(1000, 4096, text=[7, 8, 9])
    assert short[0][:5] == [7, 8, 9, 7, 8]
    assert {len(prompt) for prompt in short} == {32}
    assert {len(prompt) for prompt in probe_prompts(1000, 10, text=text)} == {9}


@pytest.mark.parametrize(("vocab_size", "num_shards"), [(151_936, 8), (32_000, 4), (100, 2)])
def test_probe_prompts_cover_every_vocabulary_shard(vocab_size: int, num_shards: int) -> None:
    padded = -(-vocab_size // 64) * 64
    for text in ([], [5] * 64):
        probe = probe_prompts(vocab_size, 4096, range(3), text=text, num_shards=num_shards)
        of = [{token // (padded // num_shards) for token in prompt[1:]} for prompt in probe[2:]]
        assert of == [{*range(num_shards)}] * 2
        assert max(token for prompt in probe for token in prompt) < vocab_size


def test_probe_prompts_skip_shard_of_special_tokens() -> None:
    """65 ids are cut into two shards of 64, the second of which holds one that is special here."""
    probe = probe_prompts(65, 4096, (64,), num_shards=2)
    assert max(token for prompt in probe for token in prompt) < 64


def test_trainer_logprobs_ignore_left_pads() -> None:
    model, probe = tiny_model("qwen3-tied"), probe_prompts(VOCAB_SIZE, 20)
    plain = trainer_logprobs(model, {"input_ids": torch.tensor(probe)}, contextlib.nullcontext())
    padded = trainer_logprobs(model, {"input_ids": torch.tensor(probe)}, contextlib.nullcontext(), num_pads=5)
    logits = model(input_ids=torch.tensor(probe)).logits[:, :-1].log_softmax(-1)
    wanted = logits.gather(-1, torch.tensor(probe)[:, 1:, None])[..., 0].detach().numpy()
    assert plain.shape == padded.shape == (4, 18)
    np.testing.assert_allclose(plain, wanted, atol=1e-5)
    np.testing.assert_allclose(padded, wanted, atol=1e-5)
