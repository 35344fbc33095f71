"""Gloo groups of a node, of the local mains and of all ranks, and the agreement of all ranks on one job.

`rollout`, `weights`, the seam and the trainer use it; it may import `faults` and `place`. It must not know the data
sent over its groups.
"""
