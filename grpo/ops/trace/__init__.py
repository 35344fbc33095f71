"""`grpo trace`: a run's timeline as Chrome's trace format, for Perfetto.

The command line alone imports it; it reads `record.timeline.records`.
It must not know how any of it came about.
"""
