"""Bringing the engines to the trainer's weights: vLLM's weight-transfer protocol over NCCL or shared memory."""
