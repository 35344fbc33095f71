"""A script as a user writes one, with the flags of `train.py` that `bench.startup` gives: no early engine host."""

from datasets import load_dataset
from trl import ModelConfig, TrlParser
from trl.rewards import get_soft_overlong_punishment
from trl.scripts.grpo import GRPOScriptArguments

from grpo import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    script, training, model = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
        args=training,
        train_dataset=load_dataset(script.dataset_name, split="train"),
    )
    trainer.train()
    trainer.accelerator.end_training()
