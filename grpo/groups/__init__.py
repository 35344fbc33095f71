"""Gloo groups of a node, of the local mains and of all ranks, and whether all ranks make one job.

`rollout`, `weights`, the seam and the trainer use it; it may import `faults` and `place`.
It must not know what travels over its groups.
"""
