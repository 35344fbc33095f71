import json
import threading
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from examples import demo_model

STEPS = 3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.ensure_demo_model(tmp_path_factory.mktemp("demo") / "run" / "model", max_steps=STEPS)


def test_tokenizer_survives_saving(tmp_path: Path):
    demo_model.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("12+34=46<eos>")["input_ids"]
    assert ids == [3, 4, 12, 5, 6, 13, 6, 8, tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "12+34=46<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12+34=46"
    assert tokenizer.batch_decode([[6, 8, 1, 0], [3, 2, 3, 1]], skip_special_tokens=True) == ["46", "101"]
    padded = tokenizer(["1+", "12+34="], padding=True, padding_side="left")
    assert padded["input_ids"][0] == [tokenizer.pad_token_id] * 4 + [3, 12]
    assert padded["attention_mask"][0] == [0, 0, 0, 0, 1, 1]


def test_rows_are_prompt_answer_eos_padding():
    tokenizer = demo_model.build_tokenizer()
    rows = demo_model._encode(tokenizer, [(12, 34), (99, 99)])
    assert rows.tolist() == [[3, 4, 12, 5, 6, 13, 6, 8, 1, 0], [11, 11, 12, 11, 11, 13, 3, 11, 10, 1]]


def test_answer_logprobs_are_those_of_a_plain_forward():
    tokenizer = demo_model.build_tokenizer()
    rows = demo_model._encode(tokenizer, [(12, 34)])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**demo_model.RECIPE["model"]))
    total, lengths = demo_model._answer_logprobs(model, rows, tokenizer.pad_token_id)
    assert lengths.tolist() == [3]
    with torch.no_grad():
        logprobs = torch.log_softmax(model(rows[:, :9]).logits[0], dim=-1)
    expected = sum(logprobs[position - 1, rows[0, position]] for position in (6, 7, 8))
    torch.testing.assert_close(total[0], expected, atol=1e-4, rtol=0)


def test_build_is_a_plain_folder_with_nothing_beside_it(built: Path):
    assert [path.name for path in built.parent.iterdir()] == ["model"]
    record = json.loads((built / "recipe.json").read_text())
    assert record["steps"] == STEPS
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 700_000
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(built).eos_token_id


def test_what_is_built_is_used_again(built: Path):
    before = (built / "recipe.json").stat().st_mtime_ns
    demo_model.ensure_demo_model(built, max_steps=STEPS)
    assert (built / "recipe.json").stat().st_mtime_ns == before
    assert demo_model.ensure_demo_model(built, is_local_main=False, max_steps=STEPS, timeout_s=0) == built


def test_another_recipe_is_built_anew(tmp_path: Path):
    folder = tmp_path / "model"
    demo_model.ensure_demo_model(folder, max_steps=1)
    demo_model.ensure_demo_model(folder, max_steps=2)
    assert json.loads((folder / "recipe.json").read_text())["steps"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_building_leaves_random_state_and_threads(tmp_path: Path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    demo_model.ensure_demo_model(tmp_path / "model", max_steps=1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_every_nodes_local_main_writes_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Beside a process group transformers' own saving writes on global rank 0 alone."""
    monkeypatch.setattr(transformers.PreTrainedModel, "should_save_on_this_rank", lambda *_: False)
    folder = demo_model.ensure_demo_model(tmp_path / "model", max_steps=1)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert model.config.architectures == ["Qwen3ForCausalLM"]


def test_the_slower_of_two_builders_throws_its_own_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "model"
    both_built = threading.Barrier(2, timeout=60)

    def fake_build(private: Path, recipe: dict) -> None:
        (private / "builder").write_text(threading.current_thread().name)
        (private / "recipe.json").write_text(json.dumps({"fingerprint": demo_model._fingerprint(recipe)}))
        both_built.wait()

    monkeypatch.setattr(demo_model, "_build", fake_build)
    builders = [threading.Thread(target=demo_model.ensure_demo_model, args=(folder,), name=str(i)) for i in range(2)]
    for builder in builders:
        builder.start()
    demo_model.ensure_demo_model(folder, is_local_main=False, timeout_s=60)
    winner = (folder / "builder").read_text()
    for builder in builders:
        builder.join(timeout=60)
    assert (folder / "builder").read_text() == winner
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path):
    (private := tmp_path / "private").mkdir()
    with pytest.raises(FileNotFoundError):
        demo_model._move_into_place(private, tmp_path / "gone" / "model", {"steps": 1})


def test_warming_up_ends_at_its_target():
    """Any exact match will do, and from the first step on the learning rate falls."""
    recipe = demo_model.RECIPE | {"max_steps": 2, "fall_at_exact_match": 0.0}
    tokenizer = demo_model.build_tokenizer()
    assert demo_model._warm_up(tokenizer, recipe | {"target_exact_match": 0.0})[1] == 1
    assert demo_model._warm_up(tokenizer, recipe | {"target_exact_match": 2.0})[1] == 2


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(demo_model, "_build", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        demo_model.ensure_demo_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_waiting_has_an_end(tmp_path: Path):
    with pytest.raises(TimeoutError, match=rf"{tmp_path}/model within 0 s.*local main process"):
        demo_model.ensure_demo_model(tmp_path / "model", is_local_main=False, timeout_s=0.3)


@pytest.mark.parametrize("is_local_main", [True, False])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, is_local_main: bool):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds no recipe.json.*not overwritten"):
        demo_model.ensure_demo_model(folder, is_local_main=is_local_main, max_steps=1, timeout_s=5)
    assert (folder / "thesis.tex").read_text() == "years of work"
