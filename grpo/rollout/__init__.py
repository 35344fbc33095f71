"""Generation: prompts are packed on their ranks, sent through the node to the engines, and return as completions.

`local_vllm` imports it; it may import `engine` and below. It must not know weights, or TRL's loss.
"""
