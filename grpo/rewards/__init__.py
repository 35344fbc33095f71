"""Reward functions: users' code with a deadline, run while the trainer does other work.

The seam and the trainer use it; it may import `record`, `faults` and `place`. It must not know engines, nor the origin
of completions.
"""
