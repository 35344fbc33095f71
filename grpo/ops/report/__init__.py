"""`grpo report`: a run, or several, as one HTML page that opens from disk.

Only the command line imports this package; it may import the definitions of a run's files (`record`, docs/metrics.md).
It must not know how their contents came about.
"""
