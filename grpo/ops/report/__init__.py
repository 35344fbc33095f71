"""`grpo report`: a run, or several, as one page that opens from disk.

The command line alone imports it; it may import what says how a run's files look (`record`, docs/metrics.md).
It must not know how anything in them came about.
"""
