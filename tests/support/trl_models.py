"""Models, prompts and tokenizers under the names by which TRL's own tests load them from the hub, made here.

Small, with random weights, so that no network is needed. Some have Qwen3's numbers of tokens, which tests of tools
write down; the others have a small vocabulary, with which a step takes milliseconds.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.multimodal_models import save_multimodal_model
from tests.support.pictured_data import pictured

OWNER = "trl-internal-testing"
SMALL_VOCABULARY = 1024
WITH_IMAGES = {
    "tiny-LlavaForConditionalGeneration": "llava",
    "tiny-Gemma3ForConditionalGeneration": "gemma3",
    "tiny-Qwen2_5_VLForConditionalGeneration": "gemma3",  # whose own processor needs torchvision
}
"""What stands under a name of TRL's."""

# As Qwen3's, of which the tests' numbers are. Its first 256 tokens are bytes.
QWEN3_VOCABULARY = 151_936
SPECIAL = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
MARKS = {151657: "<tool_call>", 151658: "</tool_call>", 151665: "<tool_response>", 151666: "</tool_response>"}
MARKS |= {151667: "<think>", 151668: "</think>"}
PIECES = {
    **{4913: '{"', 606: "name", 788: '":', 330: ' "', 64648: "multiply", 22785: "_tool", 497: '",', 16370: "arguments"},
    **{5212: ' {"', 11248: "}}\n", 1513: " don", 944: "'t", 1414: " know", 894: " any", 5392: " tool", 7692: "async"},
    **{93054: "_multiply", 35744: "increment", 9520: "step", 2765: " won", 927: "sh", 411: "out", 1318: "text"},
    **{6023: "hi", 95642: '"}}\n', 17453: "Done", 450: "dec", 13477: "rement", 16252: " increment", 14172: "tool"},
    **{6659: "call", 397: ">\n", 522: "</", 314: " {", 293: " b"},
}

IMAGES_CARD = """---
configs:
- config_name: conversational_prompt_only
  data_files:
  - split: train
    path: train.parquet
---
"""


def save_models(owner: Path) -> None:
    """Save each model and its tokenizer into a folder of its name."""
    large = qwen3_tokenizer()
    sizes = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    qwen3 = {**sizes, "vocab_size": QWEN3_VOCABULARY, "pad_token_id": 151643, "eos_token_id": 151645}
    qwen2 = {name: value for name, value in sizes.items() if name != "head_dim"}
    _save(owner / "tiny-Qwen3ForCausalLM", large, transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**qwen3)))
    moe = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**qwen3, **experts))
    _save(owner / "tiny-Qwen3MoeForCausalLM", large, moe)
    of_tools = transformers.Qwen2Config(**(qwen3 | {"head_dim": 2}), num_labels=1)
    for_rewards = {
        "tiny-Qwen2ForSequenceClassification-2.5": transformers.Qwen2ForSequenceClassification(of_tools),
    }
    for name, model in for_rewards.items():
        _save(owner / name, large, model)

    small = small_tokenizer()
    ids = {"vocab_size": SMALL_VOCABULARY, "pad_token_id": small.pad_token_id, "eos_token_id": small.eos_token_id}
    ids |= {"bos_token_id": None}
    made = {
        "tiny-Qwen2ForCausalLM-2.5": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**qwen2, **ids)),
        "tiny-LlamaForCausalLM-3.2": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids)),
        "tiny-MistralForCausalLM-0.2": transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **ids)),
        "tiny-Gemma2ForCausalLM": transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **ids)),
        "tiny-Cohere2ForCausalLM": transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**qwen2, **ids)),
        "tiny-LlamaForSequenceClassification-3.2": transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**sizes, **ids, num_labels=1)
        ),
        "tiny-Qwen3ForSequenceClassification": transformers.Qwen3ForSequenceClassification(
            transformers.Qwen3Config(**sizes, **ids, num_labels=1)
        ),
    }
    for name, model in made.items():
        _save(owner / name, small, model)
    for name, family in WITH_IMAGES.items():
        save_multimodal_model(family, owner / name)


def _save(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, model: transformers.PreTrainedModel) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_prompts(owner: Path) -> None:
    """Save the data set of both forms of prompts, of a few rows: each of them is a step in most tests."""
    folder = owner / "zen"
    texts = ["What is better?", "Who is there?", "Where is it?", "Now is"]
    rows: dict[str, list[dict[str, Any]]] = {
        "standard_prompt_only": [{"prompt": text} for text in texts],
        "conversational_prompt_only": [{"prompt": [{"role": "user", "content": text}]} for text in texts[:2]],
    }
    images = rows["conversational_prompt_only"]
    for name, where in (("zen-image", "image"), ("zen-multi-image", "images")):
        texts = [row["prompt"][0]["content"] for row in images]
        pictured(texts, where).to_parquet(str(_made(owner / name) / "train.parquet"))
        (owner / name / "README.md").write_text(IMAGES_CARD)
    header = ["---", "configs:"]
    for name, prompts in rows.items():
        (folder / name).mkdir(parents=True)
        header += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in prompts))
            header += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*header, "---", ""]))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def qwen3_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of the template's own words: with one token for each byte a step takes ten times as long."""
    alphabet, learnt = _learn(2000)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {whole.pre_tokenize_str(text)[0][0]: number for number, text in PIECES.items()}
    marks = {text: number for number, text in (SPECIAL | MARKS).items()}
    vocabulary = {char: number for number, char in enumerate(alphabet)} | pieces | marks
    free = iter(sorted(set(range(len(alphabet), QWEN3_VOCABULARY)) - {*vocabulary.values()}))
    vocabulary |= {word: next(free) for word in sorted(learnt.get_vocab()) if word not in vocabulary}
    return _tokenizer(vocabulary, learnt)


def small_tokenizer() -> transformers.PreTrainedTokenizerFast:
    marks = [*SPECIAL.values(), *MARKS.values()]
    _, learnt = _learn(SMALL_VOCABULARY - len(marks))
    vocabulary = {word: number for number, word in enumerate(sorted(learnt.get_vocab()))}
    return _tokenizer(vocabulary | {text: len(vocabulary) + number for number, text in enumerate(marks)}, learnt)


def _template() -> str:
    return (Path(trl.__file__).with_name("chat_templates") / "qwen3.jinja").read_text()


def _learn(vocab_size: int) -> tuple[list[str], Tokenizer]:
    """The bytes, and a tokenizer that has learnt the template's words from them."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet)
    learnt.train_from_iterator([_template()] * 3, trainer)
    return alphabet, learnt


def _tokenizer(vocabulary: dict[str, int], learnt: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKS.values()])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[151643],
        eos_token=SPECIAL[151645],
        chat_template=_template(),
    )
