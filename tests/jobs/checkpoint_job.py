"""Checkpoints of transformers' Trainer on real ranks, and beside each what the model held: one training step per case.

`torchrun … checkpoint_job.py OUTPUT_DIR CASES.json`: a list of `name`, `model` (a folder), `zero_stage`, `bf16`,
`gather` (whether ZeRO-3 writes safetensors) and `frozen` (a part of the names of parameters that are not trained).
Writes `OUTPUT_DIR/<name>/checkpoint-1` and `OUTPUT_DIR/<name>/held.safetensors`, under the names of the parameters.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from grpo.checkpoints.checkpoints import write_complete
from grpo.place.patches.deepspeed import leave_out_shared_memory_op

BATCH = [{"input_ids": [row + 2, 5, 6, 7, 8], "labels": [row + 2, 5, 6, 7, 8]} for row in range(16)]


def train(folder: Path, case: dict) -> None:
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=case.get("bf16", False),
        max_steps=1,
        save_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": case["zero_stage"],
                "stage3_gather_16bit_weights_on_model_save": case.get("gather", False),
                "reduce_bucket_size": "auto",  # DeepSpeed's own takes 2 GB of each rank
                "sub_group_size": 50_000,  # several groups of partitions, some parameters across two of them
            },
        },
    )
    if not deepspeed.comm.is_initialized():
        leave_out_shared_memory_op()
        deepspeed.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if case.get("frozen") and case["frozen"] in name:
            parameter.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    trainer = Trainer(model=model, args=args, train_dataset=BATCH, processing_class=tokenizer)
    trainer.train()
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned):
        held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        save_file(held, folder / "held.safetensors")
        write_complete(folder / "checkpoint-1", step=1, world_size=dist.get_world_size(), sampling={})
    dist.barrier()


dist.init_process_group("gloo")
output_dir = Path(sys.argv[1])
for case in json.loads(Path(sys.argv[2]).read_text()):
    train(output_dir / case["name"], case)
dist.destroy_process_group()
