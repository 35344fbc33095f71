"""`grpo doctor`: is this machine, or this cluster, able to run it; reported with what to set, nothing is changed.

Nobody imports it but the command line; it may import the rooms below, and does so of `meeting` and `job` alone.
It must not know engines, weights, the config or TRL: it says what is wrong where those cannot be loaded.
"""
