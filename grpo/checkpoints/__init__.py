"""Checkpoints: completeness, choice for a resume, rotation, order of prompts, safe unpickling.

The seam and the tools import it; it may import `record` and below. It must not know engines, rollouts or rewards.
"""
