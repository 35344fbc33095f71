"""What a run writes and shows: its folder and state, its history, metrics, completions, the screen, the timeline.

The trainer, the seam and the tools import it; it may import `groups`, `faults` and `place`.
It must not know engines.
"""
