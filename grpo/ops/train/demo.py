"""Demo task: two-digit addition, for a model so small that two CPU cores train it in minutes.

The model is part of the package. It gets four of ten sums right; GRPO learns the rest. The result of a warm-up, and the
possible gain after it, depend on the processor's kernels: trained on the spot, the demo would differ between machines.
`examples/demo_model.py` has made it.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

MODEL = Path(__file__).with_name("demo_model")
"""A Qwen3 of 0.6 M parameters with a character tokenizer; stored in float16, loaded in float32."""
EVAL_PAIRS = 512  # of 8100 pairs; in neither the warm-up nor GRPO's training


def demo_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return all pairs of two-digit numbers in a fixed order, split into training and evaluation pairs."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return pairs[:-EVAL_PAIRS], pairs[-EVAL_PAIRS:]


def demo_dataset(split: str = "train") -> "Dataset":
    """Return columns `prompt` ('12+34=') and `answer` ('46'); `split` is 'train' (7588 rows) or 'test' (512 rows)."""
    from datasets import Dataset

    pairs = dict(zip(("train", "test"), demo_pairs(), strict=True))[split]
    return Dataset.from_dict(
        {"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]},
    )
