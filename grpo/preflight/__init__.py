"""Checks before anything is loaded or a device touched: the model's name, the data's first row, the rewards.

The trainer and the tools import it: `grpo plan` refuses the same arguments as the trainer. It may import `config` and
below. It must not know engines, groups or the number of ranks.
"""
