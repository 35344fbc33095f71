"""A reward that is a hash of what was said, 0 or 1, and writes down what it has scored."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG_VARIABLE = "GRPO_TEST_REWARD_LOG"


def hash_of(prompt: str, completion: str) -> float:
    return float(hashlib.sha256(f"{prompt}{completion}".encode()).digest()[0] % 2)


def hashed(
    prompts: Sequence[str], completions: Sequence[str], trainer_state: Any = None, of_set: Sequence[str] = (), **_: Any
) -> list[float]:
    rewards = [hash_of(*each) for each in zip(prompts, completions, strict=True)]
    if folder := os.environ.get(LOG_VARIABLE):
        line = {"step": getattr(trainer_state, "global_step", None), "set": [*of_set], "rewards": rewards}
        line |= {"prompts": [*prompts], "completions": [*completions]}
        with (Path(folder) / f"rewards-{os.environ.get('RANK', '0')}.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    return rewards
