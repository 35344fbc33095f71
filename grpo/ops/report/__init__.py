"""`grpo report`: a run, or several, as one page that opens from disk.

A tool: nobody imports it but `cli`, and the trainer's process runs it as a command. It reads what a run has written
(`timeline.records`, docs/metrics.md), and must not know how any of it came about.
"""
