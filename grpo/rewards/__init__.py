"""Reward functions: code of the user's with a deadline, which runs while the trainer does something else.

The seam and the trainer use it; it may import `record`, `faults` and `place`.
It must not know engines, nor how completions come to be.
"""
