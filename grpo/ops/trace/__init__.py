"""`grpo trace`: a run's timeline as Chrome's trace format, for Perfetto.

A tool: nobody imports it but `cli`. It reads `timeline.records`, and must not know how any of it came about.
"""
