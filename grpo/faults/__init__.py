"""Failure handling: the failure record and its kinds, the watch, a node's sentinel, signals, limits on users' code.

Every package above `place` may import it; it imports `place` alone. It must not know engines, checkpoints or rewards:
they name their own kinds and phases.
"""
