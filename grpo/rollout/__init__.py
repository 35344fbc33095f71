"""A prompt's way: packed on its rank, through the node to the engines, sampled from one queue, and back as completions.

`local_vllm` imports it; it may import `engine` and what is below.
It must not know weights, or how TRL computes a loss.
"""
