"""What a GPU test needs, and what of it this machine lacks."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

RUN_BY = "GRPO_TEST_GPU"
"""Set by `make test-gpu`, which runs one test at a time: no other run may put two jobs on one GPU."""

REHEARSE = "GRPO_REHEARSE"
"""Set: jobs for GPUs run on CPU, as a rehearsal (`tests.gpu.jobs`)."""

USUAL_S = 10
"""What a test takes by estimate that says nothing: one without a job."""

SHORTEST_LIMIT_S = 900
"""Of a test that says nothing else; a longer one has ten times its estimate."""

STACK = ("vllm", "deepspeed", "transformers", "trl", "accelerate", "datasets", "psutil")
"""What a training job and its tests import."""


def num_gpus() -> int:
    return torch.cuda.device_count()


def rehearsed() -> bool:
    return bool(os.environ.get(REHEARSE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a test says of itself, by its marks."""

    gpus: int
    usual_s: float
    """What it takes by estimate: no GPU has measured it."""
    limit_s: float
    """After which it hangs. A job's own deadlines, which say more, are shorter."""


def needs(item: pytest.Item) -> Needs:
    gpus = max((mark.args[0] for mark in item.iter_markers("gpus")), default=0)
    takes = item.get_closest_marker("takes") or pytest.mark.takes(USUAL_S).mark
    usual_s = takes.args[0]
    limit_s = takes.kwargs.get("limit_s", max(SHORTEST_LIMIT_S, 10 * usual_s))
    return Needs(gpus=gpus, usual_s=usual_s, limit_s=limit_s)


def missing_for(item: pytest.Item) -> list[str]:
    """What this machine lacks for it; one text each, empty if it can run."""
    modules = [module for mark in item.iter_markers("requires") for module in mark.args]
    if item.get_closest_marker("job"):
        modules += STACK
    on_cpu = rehearsed() and (item.get_closest_marker("job") or item.get_closest_marker("rehearsable"))
    return lacking(0 if on_cpu else needs(item).gpus, modules)


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
