"""Patches of DeepSpeed."""

from grpo.place.patches.patch import Patch

SHARED_MEMORY_OP = Patch(
    symbol="deepspeed.ops.__compatible_ops__.deepspeed_shm_comm",
    looks="bool",
    tested="DeepSpeed 0.19",
    symptom="an op for tensor-parallel inference on CPUs (inference_all_reduce, which does without) is compiled before "
    "training: a minute of processor time on a new machine, with no word of what is waited for",
)


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its op for collectives in shared memory."""
    SHARED_MEMORY_OP.apply(lambda _: False)
