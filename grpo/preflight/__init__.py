"""What is looked at before anything is loaded or a device touched: the model's name, the data's first row, the rewards.

The trainer and the tools import it: `grpo plan` refuses what the trainer refuses. It may import `config` and below.
It must not know engines, groups or how many ranks there are.
"""
