"""TRL's own tests of tools, environments and rollout functions, with our classes: `python -m tests.trl_own CHECKOUT`.

TRL's wheel brings no tests, so CHECKOUT is a clone of its repository, at the version that is installed or near it. The
tests run as they are, without engines; `GRPOTrainer` and `GRPOConfig` are ours. What they load from the hub is made
here under the same names, as small, so that no network is needed: two models, a model of rewards, two prompts, and a
tokenizer in which the tokens that these tests write down are the texts that stand beside them.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import pytest
import torch
import transformers
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from trl import import_utils

from grpo import GRPOConfig, GRPOTrainer

CHOSEN = "TestGRPORolloutDispatch or with_tools or environment or malformed_tool or no_reward_source"
NEED_IMAGES = "multimodal"
OWNER = "trl-internal-testing"
VOCAB_SIZE = 151_936

# As Qwen3's, of which the tests' numbers are. Its first 256 tokens are bytes.
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


class WithoutEngines(GRPOConfig):
    """Ours, as TRL's is by default; in float32, which a CPU computes faster."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"use_vllm": False, "bf16": False, **options})


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of the template's own words: with one token for each byte a step takes ten times as long."""
    template = (Path(trl.__file__).with_name("chat_templates") / "qwen3.jinja").read_text()
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(as_bytes.alphabet())
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = as_bytes
    learnt.train_from_iterator([template] * 3, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {whole.pre_tokenize_str(text)[0][0]: number for number, text in PIECES.items()}
    marks = {text: number for number, text in (SPECIAL | MARKS).items()}
    vocabulary = {char: number for number, char in enumerate(alphabet)} | pieces | marks
    free = iter(sorted(set(range(len(alphabet), VOCAB_SIZE)) - {*vocabulary.values()}))
    vocabulary |= {word: next(free) for word in sorted(learnt.get_vocab()) if word not in vocabulary}
    merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = as_bytes, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKS.values()])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[151643],
        eos_token=SPECIAL[151645],
        chat_template=template,
    )


def _make_models(owner: Path) -> None:
    small = {
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 151643, "eos_token_id": 151645},
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    torch.manual_seed(0)
    made = {
        "tiny-Qwen3ForCausalLM": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small, head_dim=8)),
        "tiny-Qwen3MoeForCausalLM": transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**small, **experts)),
        "tiny-Qwen2ForSequenceClassification-2.5": transformers.Qwen2ForSequenceClassification(
            transformers.Qwen2Config(**small, num_labels=1)
        ),
    }
    for name, model in made.items():
        model.save_pretrained(owner / name)
        _tokenizer().save_pretrained(owner / name)


def _make_data(owner: Path) -> None:
    """The configuration that these tests use, of fewer rows: a step takes seconds with this vocabulary."""
    name, questions = "conversational_prompt_only", ["What is better?", "Who is there?"]
    folder = owner / "zen"
    (folder / name).mkdir(parents=True)
    rows = [json.dumps({"prompt": [{"role": "user", "content": question}]}) for question in questions]
    (folder / name / "train.jsonl").write_text("\n".join(rows))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files: {name}/train.jsonl\n---\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trl_own", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a clone of TRL's repository")
    parser.add_argument("-k", default=f"({CHOSEN}) and not {NEED_IMAGES}", help="which, as pytest's -k")
    parser.add_argument("--theirs", action="store_true", help="with TRL's own classes: what fails so, too, is not ours")
    args, others = parser.parse_known_args()
    if not (args.checkout / "tests" / "test_grpo_trainer.py").is_file():
        parser.error(f"{args.checkout} has no tests/test_grpo_trainer.py: give a clone of TRL's repository")
    with tempfile.TemporaryDirectory(prefix="grpo-trl-") as folder:
        theirs = Path(folder) / "trl_tests"  # `tests` is ours
        theirs.mkdir()
        for file in (args.checkout / "tests").glob("*.py"):
            if not file.name.startswith("test_") or file.name == "test_grpo_trainer.py":
                shutil.copy(file, theirs)
        _make_models(Path(folder) / OWNER)
        _make_data(Path(folder) / OWNER)
        for name in ("is_joblib_available",):  # of versions near the installed one
            if not hasattr(import_utils, name):
                setattr(import_utils, name, lambda: False)
        os.chdir(folder)
        sys.path.insert(0, folder)
        if not args.theirs:
            trl.GRPOTrainer, trl.GRPOConfig = GRPOTrainer, WithoutEngines
        options = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-p", "no:xdist", "-ra"]
        return pytest.main([*options, "-k", args.k, *others, str(theirs)])


if __name__ == "__main__":
    sys.exit(main())
