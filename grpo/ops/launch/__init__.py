"""`grpo launch`: the same line on every node becomes `accelerate launch` or `torchrun` with all arguments filled in.

Only the command line and the scripts in launch/ use it. It may import `ops.rendezvous`, `record`, `place`, and from
`engine` the early start of a host. It must not know the script's subject: weights, rewards, TRL.
"""
