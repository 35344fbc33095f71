"""`grpo export`: a checkpoint of a run as a plain Hugging Face folder.

Only the command line imports it; it may import `checkpoints` and `weights`. It must not need a GPU, a process group or
an engine.
"""
