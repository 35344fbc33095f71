"""Output of a run: its folder and state, history, metrics, completions, screen, timeline.

The trainer, the seam and the tools import it; it may import `groups`, `faults` and `place`. It must not know engines.
"""
