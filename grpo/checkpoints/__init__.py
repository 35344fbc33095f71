"""What a run saves and resumes from: complete checkpoints, their choice and rotation, the order of prompts, pickles.

The seam and the tools import it; it may import `record` and what is below.
It must not know engines, rollouts or rewards.
"""
