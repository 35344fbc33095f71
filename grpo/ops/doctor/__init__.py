"""`grpo doctor`: checks that a machine or cluster can run a job; reports fixes, and changes nothing.

Only the command line imports it; of the packages below it uses `ops.rendezvous`, `preflight` and `place`. It must not
know engines, weights, the config or TRL: it has to report problems where those cannot be loaded.
"""
