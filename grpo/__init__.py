"""GRPO on nodes that each host their own vLLM engine.

The import is lazy: the engine's child process imports `grpo.engine` and must load neither TRL nor DeepSpeed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.config import GRPOConfig
    from grpo.rewards.declared import scores_each
    from grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "scores_each"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    from grpo.job.importing import importing

    if name == "GRPOConfig":
        with importing():
            from grpo.config import GRPOConfig

        return GRPOConfig
    if name == "GRPOTrainer":
        with importing():
            from grpo.trainer import GRPOTrainer

        return GRPOTrainer
    if name == "scores_each":
        from grpo.rewards.declared import scores_each

        return scores_each
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")
