"""GRPO on nodes that each host their own vLLM engine.

The names in `__all__` are stable; all else may change with any version. The import is lazy: the engine's child process
imports `grpo.engine` and must load neither TRL nor DeepSpeed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.config import GRPOConfig
    from grpo.rewards.declared import scores_each
    from grpo.rollout.agents.rollout import agents
    from grpo.rollout.turns.declared import in_threads
    from grpo.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "agents", "in_threads", "scores_each"]
__version__ = "0.1.0"
_MODULES = {
    "GRPOConfig": "grpo.config",
    "GRPOTrainer": "grpo.trainer",
    "agents": "grpo.rollout.agents.rollout",
    "in_threads": "grpo.rollout.turns.declared",
    "scores_each": "grpo.rewards.declared",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'grpo' has no attribute {name!r}")
    from grpo.place.importing import importing

    with importing():
        return getattr(importlib.import_module(_MODULES[name]), name)
