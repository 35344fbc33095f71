"""A run over its attempts: output folder, checkpoints, exact resume, the order of prompts, metrics on disk.

`trainer`, `recipes` and the tools import it; it may import `job`, and stands between TRL's trainer and ours.
It must not know engines.
"""
