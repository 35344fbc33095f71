"""A weight's way: from ZeRO-3 or DDP, bucket by bucket, by NCCL or shared memory, into the engine; and the proof of it.

`local_vllm` imports it, `grpo plan` and `grpo export` borrow names and sizes; it may import `engine` and what is below.
It must not know prompts, rewards or checkpoint folders.
"""
