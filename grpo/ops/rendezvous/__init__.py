"""Nodes meet before any launcher runs: which are expected, which came, what they bring, whether their software agrees.

`ops.doctor` and `ops.launch` import it; it may import `place` alone.
It must not know what its nodes meet for: the doctor's checks and findings, engines, weights.
"""
