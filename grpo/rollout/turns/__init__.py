"""Multi-turn rollouts: every rank queries its node's engines turn by turn, without collectives.

`local_vllm` and the seam use it; it uses the pool of `rollout`. It must not know weight syncs, nor TRL's scoring and
training.
"""
