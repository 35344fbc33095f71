"""`grpo reshape`: a checkpoint of M training processes as one for N.

The command line alone imports it; it may import `checkpoints`.
It must not need a GPU, a process group or an engine.
"""
