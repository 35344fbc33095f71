"""`grpo export`: a checkpoint of a run as a plain Hugging Face folder.

`cli` alone imports it; it may import `run` and `weights`.
It must not need a GPU, a process group or an engine.
"""
