"""Rows in the form of the recipes' data sets, and what the recipes' models look like. No row is theirs."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.support.multimodal_models import save_multimodal_model
from tests.support.tiny_models import CHARACTERS, tiny_config, tiny_model, tiny_tokenizer

BOXED = r"\boxed{}"

GSM8K = [
    {
        "question": f"Ann has {n} pens and buys 1,000 more. How many are there?",
        "answer": f"{n} and 1000.\n#### {n + 1000:,}",
    }
    for n in range(2, 10)
]
SANITY = [
    {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"What is half of {n}? Put the final answer within {BOXED}."}],
        "ability": "math",
        "reward_model": {"ground_truth": rf"\frac{{{n}}}{{2}}", "style": "rule"},
        "extra_info": {"index": n},
    }
    for n in (1, 3, 5, 7, 9, 11, 13, 15)
]
DAPO = [
    {
        "prompt": f"Find the sum of {n} and {n}.",
        "solution": str(2 * n),
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": f"Solve: the sum of {n} and {n}."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * n), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(n)},
    }
    for n in range(8)
]
MATH = [
    {
        "problem": f"Compute ${n}^2$ over 2.",
        "level": "Level 2",
        "type": "Algebra",
        "solution": rf"First \boxed{{no}}. So it is $\boxed{{\frac{{{n * n}}}{{2}}}}$.",
    }
    for n in range(3, 9)
]
OPENR1 = [{**MATH[0], "answer": r"\frac{9}{2}", "source": "olympiads", "uuid": "0", "is_reasoning_complete": [True]}]
CODE = [
    {
        "source": "apps",
        "task_type": "verifiable_code",
        "in_source_id": str(n),
        "problem": f"Read a number and print it plus {n}.",
        "gold_standard_solution": f"```python\nprint(int(input()) + {n})\n```",
        "problem_id": f"vfc_{n}",
        "metadata": {"difficulty": "EASY", "problem_url": None},
        "verification_info": {
            "language": "python",
            "test_cases": [
                {"fn_name": None, "input": f"{case}\n", "output": f"{case + n}\n", "type": "stdin_stdout"}
                for case in (1, 20)
            ],
        },
        "test_reward": 1.0,
    }
    for n in range(8)
]

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 131072}


def qwen2(
    hidden: int, wide: int, layers: int, heads: int, key_value: int, *, vocabulary: int, tied: bool
) -> dict[str, Any]:
    """The sizes of a model, as its config.json has them."""
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_value}
    return {**QWEN2, **sizes, **heads_of, "tie_word_embeddings": tied}


def qwen3_5(
    hidden: int, wide: int, layers: int, heads: int, value_heads: int, *, tied: bool, tower: tuple[int, int, int]
) -> dict[str, Any]:
    """The same of a multimodal hybrid: three layers of linear attention, then one of attention.

    Args:
        value_heads: of linear attention, whose keys have 16.
        tower: depth, width and width of the MLP.
    """
    depth, width, mlp = tower
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": hidden,
            "intermediate_size": wide,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
            "max_position_embeddings": 262144,
            "vocab_size": 248320,
            "tie_word_embeddings": tied,
        },
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_heads": 16,
            "out_hidden_size": hidden,
        },
    }


SHAPES = {  # of Qwen2.5, and of the DeepSeek-R1-Distill-Qwen that are made from it
    "0.5B": qwen2(896, 4864, 24, 14, 2, vocabulary=151936, tied=True),
    "1.5B": qwen2(1536, 8960, 28, 12, 2, vocabulary=151936, tied=False),
    "7B": qwen2(3584, 18944, 28, 28, 4, vocabulary=152064, tied=False),
    "32B": qwen2(5120, 27648, 64, 40, 8, vocabulary=152064, tied=False),
    "Qwen3.5-4B": qwen3_5(2560, 9216, 32, 16, 32, tied=True, tower=(24, 1024, 4096)),
    "Qwen3.5-27B": qwen3_5(5120, 17408, 64, 24, 48, tied=False, tower=(27, 1152, 4304)),
}

# The recipe's file, without its suffix: (its model's shape, rows, a right answer to the first of them).
RECIPES: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "gsm8k_qwen2.5_0.5b": ("0.5B", GSM8K, r"They are \boxed{1002}."),
    "sanity_math_1.5b": (
        "1.5B",
        SANITY,
        r"Is it \boxed{7}?</think>It is $\boxed{0.5}$.",
    ),
    "math_qwen2.5_7b": ("7B", DAPO, r"<think>0 and 0</think>It is $\boxed{0}$."),
    "long_context_7b": ("7B", DAPO, r"<think>\boxed{7}</think>It is $\boxed{0}$."),
    "gsm8k_qwen2.5_32b": ("32B", GSM8K, r"\boxed{1,002}"),
    "gsm8k_qwen2.5_7b_lora": ("7B", GSM8K, r"It is \boxed{1002}."),
    "gsm8k_qwen3.5_4b_lora": ("Qwen3.5-4B", GSM8K, r"It is \boxed{1002}."),
    "gsm8k_qwen3.5_27b": ("Qwen3.5-27B", GSM8K, r"\boxed{1,002}"),
    "code_qwen2.5_7b": ("7B", CODE, "So:\n```python\nprint(input())\n```"),
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_shape(folder: Path, name: str) -> Path:
    """The real model's config.json, without its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def save_small_model(folder: Path, *, family: str = "qwen2") -> Path:
    """Of a recipe's architecture, with all characters of the rows and a chat template."""
    if family == "qwen2":
        assert tiny_config("qwen2-tied").model_type == QWEN2["model_type"]
        tiny_model("qwen2-tied").save_pretrained(folder)
        tokenizer = tiny_tokenizer()
    else:
        tokenizer = AutoTokenizer.from_pretrained(save_multimodal_model(family, folder))
    tokenizer.add_tokens([chr(code) for code in range(33, 127) if chr(code) not in CHARACTERS])
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder
