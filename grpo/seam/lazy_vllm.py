"""TRL's `GRPOTrainer`, which imports vLLM where it is installed: here only once somebody builds a generator of TRL's.

A rank in local mode never does. It saves a third of a rank's imports, 4 s of processor time, and some 300 MB.
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
