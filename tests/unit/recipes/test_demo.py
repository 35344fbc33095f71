from pathlib import Path

from transformers import AutoTokenizer

from grpo.recipes import demo


def test_tokenizer_survives_saving(tmp_path: Path):
    demo.build_demo_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("12+34=46<eos>")["input_ids"]
    assert ids == [3, 4, 12, 5, 6, 13, 6, 8, tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "12+34=46<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12+34=46"
    assert tokenizer.batch_decode([[6, 8, 1, 0], [3, 2, 3, 1]], skip_special_tokens=True) == ["46", "101"]
    padded = tokenizer(["1+", "12+34="], padding=True, padding_side="left")
    assert padded["input_ids"][0] == [tokenizer.pad_token_id] * 4 + [3, 12]
    assert padded["attention_mask"][0] == [0, 0, 0, 0, 1, 1]


def test_dataset_is_seeded_right_and_apart():
    train, test = demo.demo_dataset("train"), demo.demo_dataset("test")
    assert (len(train), len(test)) == (7588, 512)
    assert train.column_names == ["prompt", "answer"]
    assert train[:3] == demo.demo_dataset("train")[:3]
    for row in [*train.select(range(50)), *test]:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(row["prompt"]) == demo.PROMPT_TOKENS
        assert int(a) + int(b) == int(row["answer"])
    assert not set(train["prompt"]) & set(test["prompt"])
