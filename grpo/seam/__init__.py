"""Code around TRL's trainer: plain objects that `GRPOTrainer` calls before, after or instead of TRL's steps.

Only `trainer` imports it; it may import everything below.
It must not know how weights travel or how an engine works: it forwards TRL's calls.
"""
