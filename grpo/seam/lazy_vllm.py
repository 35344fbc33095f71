"""TRL's `GRPOTrainer`, imported without vLLM: vLLM is imported when TRL first builds its own generator.

A rank in local mode never builds one. This saves a third of a rank's import time, 4 s of CPU time and about 300 MB.
"""

import sys

from grpo.place.patches.trl import MODULES, load_vllm_late, without_vllm

if any(name in sys.modules for name in MODULES):
    from trl import GRPOTrainer as TRLTrainer  # the script has imported it: it has its vLLM
else:
    with without_vllm():
        from trl import GRPOTrainer as TRLTrainer
    load_vllm_late()

__all__ = ["TRLTrainer"]
