"""What a rank of ZeRO-3 holds at most in each phase of a training step, by torch's allocator; started by torchrun.

`python memory_phases_job.py MODEL_CONFIG_FOLDER OUTPUT.json DEVICE COMPLETIONS PROMPT_TOKENS COMPLETION_TOKENS`;
on CPU, where the allocator tells nothing, the phases are gone through all the same, and 0 is written.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from grpo.place.patches.deepspeed import leave_out_shared_memory_op

folder, output, device, *numbers = sys.argv[1:]
completions, prompt_tokens, completion_tokens = map(int, numbers)
on_gpu = device == "cuda"


def most_bytes() -> int:
    """The most that was held since the last call."""
    if not on_gpu:
        return 0
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return held


if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:
    leave_out_shared_memory_op()
deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo")
torch.manual_seed(0)
zero = {
    "train_micro_batch_size_per_gpu": completions,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
config = AutoConfig.from_pretrained(folder)
with deepspeed.zero.Init(config_dict_or_path=zero):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.gradient_checkpointing_enable({"use_reentrant": False})
add_fused_lm_head(model, outputs=("log_probs", "entropy"))  # as TRL's trainer
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-6), config=zero)
ids = torch.randint(0, config.vocab_size, (completions, prompt_tokens + completion_tokens), device=engine.device)
labels = ids.clone()
labels[:, :prompt_tokens] = -100
measured: dict[str, int] = {}
for _ in range(2):  # the optimizer's states come with the first step
    most_bytes()
    scored = engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    engine.backward(-scored.log_probs[:, -completion_tokens:].mean())
    del scored
    measured["forward and backward"] = most_bytes()
    engine.step()
    measured["optimizer step"] = most_bytes()
    measured["always"] = torch.cuda.memory_allocated() if on_gpu else 0
Path(output).write_text(json.dumps(measured))
