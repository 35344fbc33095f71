"""Rollouts of several turns: every rank asks its node's engines as often as it needs, without a collective.

`local_vllm` and the seam use it; it uses the pool of `rollout`.
It must not know how weights travel, nor how TRL scores and trains.
"""
