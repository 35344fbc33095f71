"""How many GPUs of a node to reserve: the number that makes steps shortest."""

from collections.abc import Callable, Sequence

A100_TFLOPS, A100_TBPS = 312.0, 2.0  # NVIDIA A100 80GB SXM: bfloat16 without sparsity; its memory. An H100: 989, 3.35
WORTH_IT = 0.05  # of a step: less is within the noise of a run, and of an estimate


def best_reserved(step_s: Callable[[int], float], *, reserved: int, choices: Sequence[int]) -> int:
    """The choice with the shortest step; `reserved`, what is so now, where that is as good by `WORTH_IT`.

    Args:
        step_s: seconds of a step with so many GPUs reserved.
    """
    best = min(choices, key=step_s, default=reserved)
    return best if step_s(best) < step_s(reserved) * (1 - WORTH_IT) else reserved
