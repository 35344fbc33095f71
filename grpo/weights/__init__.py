"""A weight's way: from ZeRO-3 or DDP, bucket by bucket, by NCCL or shared memory, into the engine; and the proof of it.

`local_vllm` imports it, `plan` and `export` borrow names and sizes; it may import `engine` and `job`.
It must not know prompts, rewards or checkpoint folders.
"""
