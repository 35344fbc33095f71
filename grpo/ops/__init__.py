"""What a person runs before, around and after a job: one package for each command, and what `train.py` runs.

The command line alone imports it, and nothing of the trainer does.
Commands must not know each other; what two of them share stands below them.
"""

MOST_AHEAD = 8
"""The largest `generation_lookahead` that is advised: each batch more makes completions one push older."""
