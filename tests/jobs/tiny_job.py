"""A training job for the tests, launched as users launch theirs; no `__main__` guard, on purpose.

`python tiny_job.py SETTINGS.json`: model, output_dir, `config` for `GRPOConfig`, `lora` for `LoraConfig`, `hold`
`four_bits` for `BitsAndBytesConfig`, `hold`
names what to slow down so that a test can strike in the middle of it: "sync", "train", or "generation-2", the
one after two optimizer steps, which goes on when the test writes `<output_dir>/go-on`. "reward-error-5": rank 1's
reward raises after five. "stale-3": the batch after three steps is sampled with the weights of the
one before. Writes `<output_dir>/ranks/<rank>.json` with pids, and `<output_dir>/at-<phase>` files when a phase
is entered.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from grpo import GRPOConfig, GRPOTrainer  # first, as in `train.py`: it imports what others import, in less time

# isort: split
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from grpo.engine.client import EngineClient

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support.bound_group import bind_default_group
from tests.support.contract import inner_process
from tests.support.pictured_data import pictured

settings = json.loads(Path(sys.argv[1]).read_text())
out = Path(settings["config"]["output_dir"])
rank = int(os.environ.get("RANK", "0"))
hold = settings.get("hold", "")


def mark(phase: str) -> None:
    (out / f"at-{phase}").touch()


def until_asked_to_go_on() -> None:
    """Until the test has written `go-on`."""
    while not (out / "go-on").exists():
        time.sleep(0.05)


def reward(prompts, completions, completion_ids, **kwargs):
    with (out / "ranks" / f"samples-{rank}.jsonl").open("a") as lines:
        row = {"step": trainer.state.global_step, "prompts": prompts, "completion_ids": completion_ids}
        lines.write(json.dumps(row, default=str) + "\n")  # a picture
    if hold == f"reward-error-{trainer.state.global_step}" and rank == min(
        1, int(os.environ.get("WORLD_SIZE", "1")) - 1
    ):
        raise ZeroDivisionError("a reward of the user's went wrong")
    for engine in trainer._local.engines.clients if trainer._local is not None else ():
        strike("reward", engine)
    if hold == "train" and trainer.state.global_step >= 1:
        mark("train")
        time.sleep(600)
    return [float(sum(ids) % 7) for ids in completion_ids]


strikes = {
    (phase, step): target for phase, step, target, *ranks in settings.get("strikes", []) if rank in (ranks or [rank])
}


def strike(phase: str, engine: EngineClient) -> None:
    """Kill the engine, or vLLM's process inside, if that is to be done here."""
    kill(phase, strikes.pop((phase, trainer.state.global_step), None), engine)


def kill(phase: str, target: str | None, engine: EngineClient) -> None:
    if target is not None:
        mark(f"struck-{phase}-{trainer.state.global_step}")
        pid = engine.pid if target == "host" else inner_process(engine.pid).pid
        os.kill(pid, signal.SIGKILL)


class HeldEngine(EngineClient):
    """A real engine whose client writes down what is asked of it, and waits where a test wants to strike."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if hold == "importing":
            (out / "ranks" / "host.json").write_text(json.dumps({"pid": self.pid}))
            mark("importing")

    def submit(self, sample):
        step = trainer.state.global_step
        asked = {"step": step, "engine": self.name, "prompt": sample.token_ids.tolist()}
        with (out / "ranks" / f"asked-{rank}.jsonl").open("a") as lines:
            lines.write(json.dumps({**asked, "n": len(sample.ids), "seed": sample.seed}) + "\n")
        mark("generate")
        if hold == f"generation-{step}":
            mark(hold)  # nothing is sent yet: an engine that is killed now cannot have answered
            until_asked_to_go_on()
        target = strikes.pop(("generate", step), None)  # of one engine: each is given work from a thread of its own
        if target is not None:
            inner_process(self.pid).suspend()  # so that it has not answered yet when it dies
        super().submit(sample)
        kill("generate", target, self)

    def call(self, method, timeout_s, **kwargs):
        is_held = hold == "first-sync" or (hold == "sync" and trainer.state.global_step >= 1)
        if method == "update_weights" and is_held:
            mark(hold)
            time.sleep(4)
        strike(method, self)
        return super().call(method, timeout_s, **kwargs)


class Trainer(GRPOTrainer):
    start_engine = HeldEngine

    def _generate_single_turn(self, *args, **kwargs):
        mark(f"waits-{self.state.global_step}-{rank}")
        if hold == f"stale-{self.state.global_step}":
            self._last_loaded_step = self.state.global_step  # TRL takes it that the engine has them already
        return super()._generate_single_turn(*args, **kwargs)


config = GRPOConfig(
    **{
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "vllm_max_model_length": 64,
        "vllm_sync_bucket_mb": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "vllm_engine_kwargs": {"enforce_eager": True},
        # It writes down what is sampled, and asks the trainer.
        **({"check_rewards": False} if settings["config"].get("use_vllm", True) else {}),
        **settings["config"],
    }
)
if torch.distributed.is_initialized():
    bind_default_group()  # as on GPUs: whatever library makes a group of some ranks there ends the job here
numbers = [f"{a}+{b}=" for a in range(10, 30) for b in range(10, 20)]
out.mkdir(parents=True, exist_ok=True)
(out / "ranks").mkdir(exist_ok=True)
(out / "ranks" / f"{rank}.json").write_text(json.dumps({"pid": os.getpid()}))
model, tokenizer = settings["model"], None
if settings["as_object"]:
    model = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
peft_config = LoraConfig(**settings["lora"]) if "lora" in settings else None
if peft_config is not None and settings.get("wrapped"):
    model, peft_config = get_peft_model(model, peft_config), None
four_bits = BitsAndBytesConfig(load_in_4bit=True, **settings["four_bits"]) if "four_bits" in settings else None
dataset = Dataset.from_dict({"prompt": numbers})
if "pictured" in settings:
    dataset = pictured(numbers, **settings["pictured"])
trainer = Trainer(
    model=model,
    quantization_config=four_bits,
    peft_config=peft_config,
    processing_class=tokenizer,
    reward_funcs=reward,
    args=config,
    train_dataset=dataset,
    eval_dataset=dataset.select(range(4)),
)
hosts = [client.pid for client in trainer._local.engines.clients] if trainer._local is not None else []
backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
(out / "ranks" / f"{rank}.json").write_text(json.dumps({"pid": os.getpid(), "hosts": hosts, "backend": backend}))
trainer.train()
if rank == 0:
    (out / "finished").touch()
