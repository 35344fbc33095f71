import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from examples import demo_model
from grpo.ops.train import demo

TOKENIZER = AutoTokenizer.from_pretrained(demo.MODEL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the script, stopped after two steps."""
    folder, threads, argv = tmp_path_factory.mktemp("made"), torch.get_num_threads(), sys.argv
    sys.argv = ["demo_model", str(folder), "--max_steps", "2"]
    try:
        with torch.random.fork_rng(devices=[]):
            demo_model.main()
    finally:
        torch.set_num_threads(threads)
        sys.argv = argv
    return folder


def test_demo_tokenizer_encodes_and_decodes_sums():
    ids = TOKENIZER("12+34=46<eos>")["input_ids"]
    assert ids == [3, 4, 12, 5, 6, 13, 6, 8, TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(ids) == "12+34=46<eos>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "12+34=46"
    assert TOKENIZER.batch_decode([[6, 8, 1, 0], [3, 2, 3, 1]], skip_special_tokens=True) == ["46", "101"]
    padded = TOKENIZER(["1+", "12+34="], padding=True, padding_side="left")
    assert padded["input_ids"][0] == [TOKENIZER.pad_token_id] * 4 + [3, 12]
    assert padded["attention_mask"][0] == [0, 0, 0, 0, 1, 1]


def test_encode_makes_rows_of_prompt_answer_eos_padding():
    rows = demo_model.encode(TOKENIZER, [(12, 34), (99, 99)])
    assert rows.tolist() == [[3, 4, 12, 5, 6, 13, 6, 8, 1, 0], [11, 11, 12, 11, 11, 13, 3, 11, 10, 1]]


def test_answer_logprobs_match_plain_forward():
    rows = demo_model.encode(TOKENIZER, [(12, 34)])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**demo_model.SHAPE))
    total, lengths = demo_model.answer_logprobs(model, rows, TOKENIZER.pad_token_id)
    assert lengths.tolist() == [3]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(rows[:, :9]).logits[0], dim=-1)
    expected = sum(logprobs[position - 1, rows[0, position]] for position in (6, 7, 8))
    torch.testing.assert_close(total[0], expected, atol=1e-4, rtol=0)


def test_demo_model_answers_four_of_ten_sums():
    """Of those that neither the warm-up nor the demo trains on; in float32, from half of its size."""
    model = AutoModelForCausalLM.from_pretrained(demo.MODEL)
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (demo.MODEL / "model.safetensors").stat().st_size < 1_300_000
    with torch.no_grad():
        rows = demo_model.encode(TOKENIZER, demo.demo_pairs()[1])
        logprobs, _ = demo_model.answer_logprobs(model, rows, TOKENIZER.pad_token_id)
    assert 0.36 < logprobs.exp().mean() < 0.46


def test_demo_model_script_matches_packaged_model(made: Path):
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in demo.MODEL.iterdir())
    written, packaged = (AutoConfig.from_pretrained(folder) for folder in (made, demo.MODEL))
    for name in (*demo_model.SHAPE, "dtype", "eos_token_id", "pad_token_id", "architectures"):
        assert getattr(written, name) == getattr(packaged, name), name
    assert (made / "tokenizer.json").read_text() == (demo.MODEL / "tokenizer.json").read_text()
    shapes = ({name: value.shape for name, value in read(folder).items()} for folder in (made, demo.MODEL))
    assert next(shapes) == next(shapes)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_warm_up_at_target_ends(monkeypatch: pytest.MonkeyPatch):
    """Any exact match will do, and from the first step on the learning rate falls."""
    monkeypatch.setattr(demo_model, "FALL_AT", 0.0)
    first = demo_model.warm_up(TOKENIZER, seed=0, max_steps=1).state_dict()
    monkeypatch.setattr(demo_model, "TARGET", 0.0)
    ended = demo_model.warm_up(TOKENIZER, seed=0, max_steps=9).state_dict()
    assert all(torch.equal(first[name], ended[name]) for name in first)
