"""Between TRL's trainer and ours: every private name of TRL and transformers that is overridden, read or assigned.

`trainer` alone imports it; it may import everything below.
It must not know how weights travel, or what an engine is: it hands on what TRL asks for.
"""
