"""Rendezvous of nodes before any launcher runs: expected and present nodes, their reports, agreement of their software.

`ops.doctor` and `ops.launch` import it; it may import `place` alone. It must not know the purpose of the rendezvous:
the doctor's checks and findings, engines, weights.
"""
