"""`grpo plan`: what goes where, and whether it fits: placement and batch of a job, memory as estimates.

The command line alone imports it; it may import `ops.train` and everything below.
It must not need a GPU, nor start anything.
"""
