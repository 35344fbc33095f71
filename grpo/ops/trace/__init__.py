"""`grpo trace`: a run's timeline in Chrome's trace format, for Perfetto.

Only the command line imports this package; it reads `record.timeline.records`, and must not know how they came about.
"""
