"""The real trainer over an engine that answers with texts, by what it is asked, and what such an engine says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.calculator_model import MODEL, build_tokenizer, problems
from grpo import GRPOConfig, GRPOTrainer
from grpo.engine.messages import Sample

TOKENIZER = build_tokenizer()
USER = re.compile(r"<u>(\d+)\*(\d+)<e><a>$")


def call(name: str, **arguments: int | str) -> str:
    """What a model writes to call a tool, as the template has it."""
    return f"<c>{name}{json.dumps(arguments)}</c><e>"


def speaks(reply: Callable[[str, int], str]) -> Callable[[Sample, int], list[int]]:
    """The tokens of what `reply` makes of the episode so far, and its seed."""

    def tokens_of(sample: Sample, number: int) -> list[int]:
        ids = TOKENIZER(reply(TOKENIZER.decode(sample.token_ids), sample.seed + number))["input_ids"]
        return ids[: sample.overrides.get("max_tokens", 64)]

    return tokens_of


def speaks_in_generate(reply: Callable[[str, int], str]) -> Any:
    """In the place of the model's `generate`: what an engine that `speaks` would say."""

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        texts = [TOKENIZER.decode(row[row != TOKENIZER.pad_token_id]) for row in input_ids]
        said = [TOKENIZER(reply(text, number))["input_ids"] for number, text in enumerate(texts)]
        longest = max(map(len, said))
        rows = [ids + [TOKENIZER.pad_token_id] * (longest - len(ids)) for ids in said]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    return generate


def save_model(folder: Path) -> Path:
    """Random weights, beside the calculator's tokenizer."""
    torch.manual_seed(0)
    ids = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=128, dtype="float32", **ids, **MODEL)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def make_trainer(model: Path, output_dir: Path, reward: Any, **more: Any) -> GRPOTrainer:
    """Two prompts a step, four completions of each."""
    output_dir.mkdir(exist_ok=True)
    settings = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 64,
        "vllm_max_model_length": 96,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "log_completions": True,
        "num_completions_to_print": 0,
        "check_rewards": False,
        "vllm_max_logprob_gap": 1e9,  # a scripted engine computes no probabilities
        **more.pop("config", {}),
    }
    args = GRPOConfig(use_cpu=True, bf16=False, **settings)
    data = more.pop("train_dataset", problems(8, seed=1))
    return GRPOTrainer(model=str(model), reward_funcs=reward, args=args, train_dataset=data, **more)


Make = Callable[..., GRPOTrainer]


def calculates(text: str, seed: int) -> str:
    """With an odd seed it asks the calculator and says what that says, with an even one it guesses."""
    if (asked := USER.search(text)) is None:
        return text.rpartition("<t>")[2].removesuffix("<e><a>") + "<e>"
    return call("times", a=int(asked[1]), b=int(asked[2])) if seed % 2 else "17<e>"


def right(completions: list[Any], answer: list[int], **more: Any) -> list[float]:
    return [float(said[-1]["content"] == str(wanted)) for said, wanted in zip(completions, answer, strict=True)]


def steps_of(trainer: GRPOTrainer) -> list[dict[str, float]]:
    trainer.train()
    return [line for line in trainer.state.log_history if "reward" in line]
