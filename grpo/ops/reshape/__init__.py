"""`grpo reshape`: convert a checkpoint of M training processes for N.

Only the command line imports this package; it may import `checkpoints`. It must not need a GPU, a process group or an
engine.
"""
