"""A made-up cluster for `grpo plan`: files that describe it, and the command on them; nothing is started."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from grpo.cli import main

LLAMA_8B = {  # meta-llama/Llama-3.1-8B: 8,030,261,248 parameters
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}

HIDDEN, MLP, KEYS, LAYERS, VOCABULARY = 3584, 18944, 512, 28, 152064
QWEN_7B = {  # Qwen/Qwen2.5-7B-Instruct
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
BASE = 7_615_616_512

TRAINING = {
    "output_dir": "out",
    "dataset_name": "openai/gsm8k",
    "reward_funcs": ["exact_match"],
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 1024,
    "vllm_max_model_length": 1536,
    "report_to": "none",
}


class Cluster:
    """Files for a made-up cluster, and `grpo plan` on them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def accelerate(self, num_machines: int, num_processes: int, **settings: Any) -> Path:
        file = self.folder / "accelerate.yaml"
        zero = {"zero_stage": 3, "deepspeed_multinode_launcher": "standard"}
        common = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}
        numbers = {"num_machines": num_machines, "num_processes": num_processes}
        file.write_text(yaml.safe_dump({**common, **numbers, "deepspeed_config": zero, **settings}))
        return file

    def training(self, model: dict[str, Any] | None = None, **settings: Any) -> Path:
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model or LLAMA_8B))
        file = self.folder / "training.yaml"
        file.write_text(yaml.safe_dump({"model_name_or_path": str(folder), **TRAINING, **settings}))
        return file

    def plan(self, *words: str | Path) -> tuple[int, str]:
        """Exit code and standard output."""
        code = main(["plan", *map(str, words)])
        return code, self.capsys.readouterr().out

    def read(self, *words: str | Path) -> dict[str, Any]:
        """The JSON output, whose `works` agrees with the exit code."""
        code, out = self.plan("--json", *words)
        plan = json.loads(out)
        assert plan["works"] == (code == 0)
        assert bool(plan["errors"] or plan["unknown"]) == (code == 1)
        return plan


def lines_of(budget: dict[str, Any]) -> dict[str, int]:
    return {line["key"]: line["num_bytes"] for line in budget["lines"]}
