"""`grpo eval`: a saved model on the evaluation sets of its run, with this machine's engines and no trainer.

It must not know the other commands.
"""
