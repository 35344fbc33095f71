"""`grpo launch`: the same line on every node becomes `accelerate launch` or `torchrun` with everything filled in.

Only the command line and the scripts in launch/ use it. It may import `ops.rendezvous`, `record`, `place`, and of
`engine` the early start of a host. It must not know what the script trains: weights, rewards, TRL.
"""
