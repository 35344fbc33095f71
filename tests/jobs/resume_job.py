"""A training job without an engine that is stopped, killed and resumed: TRL's transformers generation, 2 ranks, ZeRO-3.

`python resume_job.py SETTINGS.json`: `model`, `config` for `GRPOConfig`, `num_prompts`, `pictured` (see
`tests.support.pictured_data`), and steps: `signal_at`, at which rank 1 gets SIGUSR1; `kill_in_save`, in whose save rank
1 is killed. Writes the weights that it ends with (with `states`, master weights and moments too), and what every reward
saw; rewards are random in part, but for `noise` false, and with `flat_evens` the same for every second prompt.
"""

import hashlib
import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path

from grpo import GRPOConfig, GRPOTrainer  # first: it imports what others import, in less time

# isort: split
import deepspeed
import torch
from datasets import Dataset
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from peft import LoraConfig

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support.pictured_data import pictured

warnings.filterwarnings("ignore", category=FutureWarning)
settings = json.loads(Path(sys.argv[1]).read_text())
out = Path(settings["config"]["output_dir"])
rank = int(os.environ["RANK"])


def reward(completion_ids, **kwargs):
    step = trainer.state.global_step
    if trainer.model.training:
        with (out / f"seen-{rank}.jsonl").open("a") as lines:
            row = {"step": step, "prompts": kwargs["prompts"], "completions": completion_ids}
            lines.write(json.dumps(row, default=str) + "\n")  # a picture
    if step == settings.get("signal_at") and rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    if step == settings.get("kill_at"):
        os.kill(os.getpid(), signal.SIGKILL)
    noise = settings.get("noise", True)
    if settings.get("flat_evens"):  # prompts that begin with an even number teach nothing
        flat = [int(prompt.partition("+")[0]) % 2 == 0 for prompt in kwargs["prompts"]]
        return [3.0 if is_flat else float(sum(ids) % 7) for ids, is_flat in zip(completion_ids, flat, strict=True)]
    return [sum(ids) % 7 + noise * random.random() for ids in completion_ids]  # Python's random numbers resume, too


class Trainer(GRPOTrainer):
    def _save_rng_state(self, output_dir):
        if rank == 1 and self.state.global_step == settings.get("kill_in_save"):
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


prompts = [f"{10 + n}+{20 + n}=" for n in range(settings["num_prompts"])]
of_text = Dataset.from_dict({"prompt": prompts})
trainer = Trainer(
    model=settings["model"],
    peft_config=LoraConfig(**settings["lora"]) if "lora" in settings else None,
    reward_funcs=reward,
    args=GRPOConfig(
        **{
            "use_vllm": False,
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "linear",
            "report_to": "none",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **settings["config"],
        }
    ),
    train_dataset=pictured(prompts, **settings["pictured"]) if "pictured" in settings else of_text,
)
trainer.train()
with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
    digest = hashlib.sha256(
        b"".join(p.detach().float().contiguous().numpy().tobytes() for p in trainer.model.parameters())
    ).hexdigest()
if rank == 0:
    (out / "weights").write_text(digest)
if settings.get("states"):
    states = {}
    for name, parameter in trainer.model.named_parameters():
        moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        states[name] = [safe_get_full_fp32_param(parameter), *moments]
    if rank == 0:
        torch.save(states, out / "states.pt")
trainer.save_model(str(out / "final"))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
