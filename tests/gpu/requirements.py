"""What a GPU test needs, and what of it this machine lacks."""

import importlib.util
import os
from collections.abc import Sequence

import torch

RUN_BY = "GRPO_TEST_GPU"
"""Set by `make test-gpu`, which runs one test at a time: no other run may put two jobs on one GPU."""

REHEARSE = "GRPO_REHEARSE"
"""Set: jobs for GPUs run on CPU, as a rehearsal (`tests.gpu.jobs`)."""

STACK = ("vllm", "deepspeed", "transformers", "trl", "accelerate", "datasets", "psutil")
"""What a training job and its tests import."""


def num_gpus() -> int:
    return torch.cuda.device_count()


def rehearsed() -> bool:
    return bool(os.environ.get(REHEARSE))


def lacking(gpus: int, modules: Sequence[str], *, found: int | None = None) -> list[str]:
    """What is missing for a test that needs `gpus` GPUs and these modules; one text each, empty if it can run.

    Args:
        found: GPUs of this machine; None to count them.
    """
    found = num_gpus() if found is None else found
    missing = []
    if found < gpus:
        here = "this machine has none" if found == 0 else f"{gpus - found} more than this machine has"
        missing.append(f"{gpus} GPU{'s' if gpus > 1 else ''} ({here})")
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        missing.append(f"{', '.join(absent)} (not installed)")
    if gpus and not missing and not os.environ.get(RUN_BY):
        missing.append("`make test-gpu`, which runs one at a time")
    return missing
