"""`grpo launch`: the same line on every node becomes `accelerate launch` or `torchrun` with everything filled in.

Only the command line and the scripts in launch/ use it. Of the other rooms it imports `meeting`, `job`, `run`, and of
`engine` the early start of a host. It must not know what the script trains: weights, rewards, TRL.
"""
