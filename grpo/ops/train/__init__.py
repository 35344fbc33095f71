"""Program of `train.py`: arguments, rewards by name, and the demo with its model and data.

`train.py` and `ops.plan` import this package; it may import the trainer and everything below. No package of the
training loop may import it.
"""
