"""`grpo reshape`: a checkpoint of M training processes as one for N.

`cli` alone imports it; it may import `run`.
It must not need a GPU, a process group or an engine.
"""
