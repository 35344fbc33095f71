"""Weight syncs: from ZeRO-3 or DDP, bucket by bucket, by NCCL or shared memory, to the engines; and their verification.

`local_vllm` imports it, `grpo plan` and `grpo export` use its names and sizes; it may import `engine` and below. It
must not know prompts, rewards or checkpoint folders.
"""
