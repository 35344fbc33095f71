"""`grpo plan`: what goes where, and whether it fits: placement and batch of a job, memory and push as estimates.

`cli` alone imports it; it may import `recipes` and everything below.
It must not need a GPU, nor start anything.
"""
