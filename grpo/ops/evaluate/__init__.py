"""`grpo eval`: a saved model on the evaluation sets of its run, by this machine's engines alone.

Must not know the other commands.
"""
