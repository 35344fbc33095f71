"""Nodes meet before any launcher runs: which are expected, which came, what they bring, whether their software agrees.

The tools may import it (the doctor; a launcher); of the other rooms it imports `job` alone.
It must not know what its nodes meet for: the doctor's checks and findings, engines, weights.
"""
