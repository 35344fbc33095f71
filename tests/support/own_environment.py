"""Imported first by `tests/conftest.py`: what a user's shell, a cluster or a launcher has set is for the product alone.

Before any library, for they read their variables when they are imported. What a test wants set, it sets.
"""

import os
import re
from collections.abc import MutableMapping

from tests.support.launching import ENGINES_CACHES

_BEGINNINGS = (
    "HF HUGGINGFACE HUGGING_FACE TRANSFORMERS DATASETS TRL ACCELERATE FSDP PARALLELISM_CONFIG VLLM WANDB TRACKIO "
    "TORCHELASTIC TORCH_ELASTIC PET SLURM SBATCH JOB_COMPLETION GRPO"
)
_NAMES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "MASTER_ADDR MASTER_PORT COLUMNS LINES FORCE_COLOR NO_COLOR TZ LANGUAGE PYTHONWARNINGS "
    "TOKENIZERS_PARALLELISM TORCH_LOGS TORCH_DISTRIBUTED_DEBUG"
)
_LEFT_OUT = re.compile(f"(?:{'|'.join(_BEGINNINGS.split())})_.*|{'|'.join(_NAMES.split())}")
# Where caches are, and what is asked of the tests. Which GPUs are the job's (CUDA_VISIBLE_DEVICES) is not looked at.
_KEPT = re.compile("VLLM_CACHE_ROOT|GRPO_(?:TEST|GPU|TRL|VLLM)_.*")


def leave_out_the_users(environment: MutableMapping[str, str]) -> None:
    """What would change how tests end; and a home of Hugging Face's without the user's token and defaults."""
    for name in [*environment]:
        if _LEFT_OUT.fullmatch(name) and not _KEPT.fullmatch(name):
            del environment[name]
    environment["HF_HOME"] = str(ENGINES_CACHES / "huggingface")


leave_out_the_users(os.environ)

# Tests run side by side: threads of torch's that wait for each other on taken cores cost a third of all processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
