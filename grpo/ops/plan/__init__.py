"""`grpo plan`: placement and batch of a job, and estimates of its memory.

Only the command line imports this package; it may import `ops.train` and everything below. It needs no GPU and starts
nothing.
"""
