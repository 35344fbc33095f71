"""Around TRL's trainer: plain objects, to each of which `GRPOTrainer` routes the steps of TRL that it has to do with.

`trainer` alone imports it; it may import everything below.
It must not know how weights travel, or how an engine works: it hands on what TRL asks for.
"""
