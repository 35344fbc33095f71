"""What `train.py` runs: arguments, rewards by name, and the demo with its model and data.

`train.py` and `ops.plan` import it; it may import the trainer and everything below.
No package of the loop may know it.
"""
