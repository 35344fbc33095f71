"""`grpo doctor`: is this machine, or this cluster, able to run it; reported with what to set, nothing is changed.

The command line alone imports it; of the packages below it uses `ops.rendezvous`, `preflight` and `place`.
It must not know engines, weights, the config or TRL: it says what is wrong where those cannot be loaded.
"""
