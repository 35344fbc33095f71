"""What comes back of a checkpoint with adapters."""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo import GRPOConfig, GRPOTrainer


def test_load_checkpoint_with_reference_adapter_restores_trained_one(tiny_model: Path, tmp_path: Path) -> None:
    """Of a PeftModel that is given, with `beta`, TRL keeps a copy of the adapter, in a folder below the checkpoint."""
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    wrapped = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"]))
    settings = {"use_vllm": False, "beta": 0.1, "use_cpu": True, "bf16": False, "report_to": "none"}
    trainer = GRPOTrainer(
        model=wrapped,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=GRPOConfig(output_dir=str(tmp_path / "run"), gradient_checkpointing=False, **settings),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 8}),
    )
    adapter = {name: each for name, each in trainer.model.named_parameters() if ".default." in name}
    for parameter in adapter.values():
        torch.nn.init.normal_(parameter)
    trained = {name: parameter.detach().clone() for name, parameter in adapter.items()}
    trainer.model.save_pretrained(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "ref" / "adapter_model.safetensors").exists()
    for parameter in adapter.values():
        torch.nn.init.zeros_(parameter)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint"))
    for name, parameter in trainer.model.named_parameters():
        if ".default." in name:
            assert torch.equal(parameter, trained[name]), name
            assert parameter.requires_grad
        if ".ref." in name:
            assert not parameter.requires_grad
