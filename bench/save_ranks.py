"""One rank of `bench.save`, started by torchrun: `python -m bench.save_ranks SETTINGS.json`; rank 0 writes `0.json`."""

import functools
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from bench.report import interleave
from grpo import GRPOConfig, GRPOTrainer
from grpo.checkpoints.checkpoints import write_complete
from grpo.checkpoints.rotation import size_of
from grpo.groups.process_groups import join_deepspeed
from grpo.seam.lazy_vllm import TRLTrainer
from grpo.seam.saving import sampling_of

warnings.filterwarnings("ignore", category=FutureWarning)
WORDS = ["<pad>", "</s>", "one", "two", "three", "and"]


def make_trainer(settings: dict[str, Any], out: Path) -> GRPOTrainer:
    """With an engine of DeepSpeed's that has made a step, so that there are moments to save. Collective."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="one"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )
    config = Qwen2Config(
        **settings["shape"],
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    args = GRPOConfig(
        output_dir=str(out),
        use_vllm=False,
        use_cpu=settings["cpu"],
        bf16=False,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=2,
        max_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        deepspeed={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        },
    )
    join_deepspeed(args.deepspeed)  # before a model is made in parts
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_config(config, dtype="float32"),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["one and two", "two and three"] * 4}),
    )
    trainer.train()
    return trainer


class Saves:
    """One checkpoint after the other, each timed, brought to the disk and deleted. All methods are collective."""

    def __init__(self, trainer: GRPOTrainer, out: Path) -> None:
        self.trainer = trainer
        self.out = out
        self.gigabytes: dict[str, float] = {}
        self.until_complete: list[float] = []

    def timed(self, name: str, save: Callable[[], None]) -> float:
        """Seconds in which this rank does nothing but save."""
        self.trainer.state.global_step += 1
        folder = self.out / f"checkpoint-{self.trainer.state.global_step}"
        dist.barrier()
        begun = time.monotonic()
        save()
        held = time.monotonic() - begun
        self.trainer._parts.saving.finish()
        dist.barrier()
        if name == "beside training":
            self.until_complete.append(time.monotonic() - begun)
        if dist.get_rank() == 0:
            os.sync()
            self.gigabytes[name] = size_of(folder) / 1e9
            shutil.rmtree(folder)
        dist.barrier()
        return held

    def as_before(self) -> None:
        """transformers' own, then sizes in a record; as the trainer did before it knew of disks."""
        trainer = self.trainer
        folder = self.out / f"checkpoint-{trainer.state.global_step}"
        TRLTrainer._save_checkpoint(trainer, trainer.model_wrapped, None)
        torch.save(trainer._parts.saving.rollout_state(), folder / f"rollout_state_{trainer.args.process_index}.pt")
        trainer._parts.run.groups.meet()
        if dist.get_rank() == 0:
            write_complete(
                folder, step=trainer.state.global_step, world_size=2, sampling=sampling_of(trainer.args), sums={}
            )
        trainer._parts.run.groups.meet()

    def beside_training(self) -> None:
        self.trainer._save_checkpoint(self.trainer.model_wrapped, None)

    def at_once(self) -> None:
        self.beside_training()
        self.trainer._parts.saving.finish()
        self.trainer._parts.run.groups.meet()

    def shards_alone(self) -> None:
        settings = self.trainer.model_wrapped._config.zero_config
        settings.gather_16bit_weights_on_model_save = False
        try:
            self.beside_training()
        finally:
            settings.gather_16bit_weights_on_model_save = True


def filesystem(path: Path) -> str:
    """Of the disk on which `path` is."""
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else "a disk"


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    out = Path(settings["folder"]) / "run"
    trainer = make_trainer(settings, out)
    saves = Saves(trainer, out)
    ways = {
        "as before": saves.as_before,
        "beside training": saves.beside_training,
        "at once": saves.at_once,
        "shards alone": saves.shards_alone,
    }
    saves.timed("as before", saves.as_before)  # the first one pays for what none of the others does
    seconds = interleave(
        {name: functools.partial(saves.timed, name, way) for name, way in ways.items()},
        settings["repetitions"],
    )
    if dist.get_rank() == 0:
        found = {
            "parameters": sum(parameter.ds_numel for parameter in trainer.model.parameters()),
            "seconds": seconds,
            "gigabytes": saves.gigabytes,
            "until_complete": saves.until_complete,
            "filesystem": filesystem(out.resolve()),
        }
        (Path(settings["folder"]) / "0.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
