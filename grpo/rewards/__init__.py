"""Reward functions: code of the user's with a deadline, which runs while the trainer does something else.

`conversations` and the trainer use it; it may import `job` and `timeline`. It must not know engines, nor how
completions come to be.
"""
