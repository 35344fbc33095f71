"""A training job that waits at one point of one phase, so that a fault can be put there; for `tests/faults`.

`python fault_job.py SETTINGS.json`: `model`, `marks` (a folder), `hold` (a phase, or nothing), `from_step` (it waits
behind so many), `prompt_words` (of the prompts that a stream has behind the first ones), `stuck` and `eats` (a rank
that does not go on, or takes all memory when it does; null: none), `reward` (what rank 1's does behind the first step:
"raises", "hangs"; "all hang": every rank's), and `config` for `GRPOConfig`. Writes `marks/rank-<rank>.json` and
`marks/engine-<rank>-<n>.json` with pids, and `marks/at-<phase>-<rank>` where it waits, until `marks/go-on` is there;
`marks/submitted-<rank>` when an engine has got the requests that it waited with.
"""

import json
import os
import sys
import time
from pathlib import Path

from grpo import GRPOConfig, GRPOTrainer  # first: it imports what others import, in less time

# isort: split
from datasets import Dataset, IterableDataset

from grpo.engine.client import EngineClient
from grpo.preflight.data import SAMPLED_ROWS

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support.memory_groups import eat_all_memory

HOLD_S = 300.0
LOCAL = {  # with engines
    "vllm_max_model_length": 64,
    "vllm_sync_bucket_mb": 1,
    "vllm_engine_kwargs": {"enforce_eager": True},
    "check_rewards": False,
}

settings = json.loads(Path(sys.argv[1]).read_text())
marks = Path(settings["marks"])
rank = int(os.environ["RANK"])
waited: set[str] = set()
engines: list[int] = []


def write(name: str, **values: object) -> None:
    draft = marks / f".{name}.{rank}"
    draft.write_text(json.dumps(values))
    draft.rename(marks / name)


def mark(phase: str) -> None:
    """This rank is in `phase`, behind the first step; it goes on when it is asked to."""
    if settings["hold"] != phase or phase in waited:
        return
    waited.add(phase)
    write(f"at-{phase}-{rank}", pid=os.getpid())
    deadline = time.monotonic() + HOLD_S
    while not ((marks / "go-on").exists() and rank != settings["stuck"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    if rank == settings["eats"]:
        eat_all_memory()


def reward(completions, completion_ids, **kwargs):
    wish = settings["reward"]
    if trainer.state.global_step >= settings["from_step"] and (rank == 1 or wish == "all hang"):
        if wish:
            write(f"at-reward-{rank}", pid=os.getpid())
        if wish == "raises":
            raise ZeroDivisionError("a reward of the user's went wrong")
        if wish in ("hangs", "all hang"):
            time.sleep(HOLD_S)
    return [float(sum(ids) % 7) for ids in completion_ids]


class Engine(EngineClient):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        engines.append(self.pid)
        write(f"engine-{rank}-{len(engines)}.json", pid=self.pid)
        mark("start")

    def submit(self, sample):
        if trainer.state.global_step >= settings["from_step"]:
            mark("generate")
        super().submit(sample)
        if "generate" in waited:
            write(f"submitted-{rank}")

    def call(self, method, timeout_s, **kwargs):
        if method == "update_weights" and trainer.state.global_step >= settings["from_step"]:
            mark("sync")
        return super().call(method, timeout_s, **kwargs)


class Trainer(GRPOTrainer):
    start_engine = Engine

    def training_step(self, *args, **kwargs):
        if self.state.global_step >= settings["from_step"]:
            mark("train")
        return super().training_step(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        mark("save")

    def _load_optimizer_and_scheduler(self, checkpoint):
        mark("resume")
        super()._load_optimizer_and_scheduler(checkpoint)


write(f"rank-{rank}.json", pid=os.getpid())
numbers = [f"{a}+{b}=" for a in range(10, 30) for b in range(10, 20)]
rows = Dataset.from_dict({"prompt": numbers})
if settings["prompt_words"]:  # which nobody sees before they come: a stream
    seen = 0  # of passes together: the checks before a start read the first rows

    def stream():
        global seen
        for row in range(1000):
            seen += 1
            is_long = seen > SAMPLED_ROWS + 20
            if is_long:
                write(f"at-long-prompts-{rank}")
            yield {"prompt": " ".join(["1+1="] * settings["prompt_words"]) if is_long else numbers[row % len(numbers)]}

    rows = IterableDataset.from_generator(stream)
trainer = Trainer(
    model=settings["model"],
    reward_funcs=reward,
    args=GRPOConfig(
        **{
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "report_to": "none",
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **(LOCAL if settings["config"].get("use_vllm", True) else {}),
            **settings["config"],
        }
    ),
    train_dataset=rows,
)
trainer.train()
