"""The demo task: two-digit addition, for a model so small that two CPU cores train it in minutes.

The model is `train.py`'s to bring (`examples/demo_model.py`): one of 0.6 M parameters that has the rest to learn.
"""

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

EVAL_PAIRS = 512  # of the 8100, seen neither by the warm-up nor by GRPO's training

# What decides about the demo's model and data, the model's warm-up aside.
RECIPE: dict[str, Any] = {
    "version": 1,
    "model": {
        # vLLM pads a vocabulary to multiples of 64. With exactly 64 rows both halves of a tensor-parallel pair hold
        # real ones; rows beyond the 14 tokens are unused.
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # two: tensor parallel 2 gets one each
        "head_dim": 32,  # the smallest that vLLM's CPU attention knows
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "seed": 0,
}


def demo_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of two-digit numbers in a fixed order, cut into training and evaluation pairs."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(RECIPE["seed"]).shuffle(pairs)
    return pairs[:-EVAL_PAIRS], pairs[-EVAL_PAIRS:]


def demo_dataset(split: str = "train") -> "Dataset":
    """Columns `prompt` ('12+34=') and `answer` ('46'); `split` is 'train' (7588 rows) or 'test' (512 rows)."""
    from datasets import Dataset

    pairs = dict(zip(("train", "test"), demo_pairs(), strict=True))[split]
    return Dataset.from_dict(
        {"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]},
    )
