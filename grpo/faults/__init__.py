"""How all end together: the failure record and its kinds, the watch, a node's sentinel, signals, limits on users' code.

Everything above `place` may import it; it imports `place` alone.
It must not know what fails: engines, checkpoints and rewards name their own kinds and phases.
"""
