"""Trains a model with GRPO: `accelerate launch --config_file configs/1node.yaml train.py --config FILE`.

With no model named it runs the demo task, the first thing to run on a new machine or cluster.
"""

from grpo.engine.early import start_host

if __name__ == "__main__":
    start_host()  # first: it imports vLLM while this process imports the trainer
    from grpo.ops.train.script import main

    main()
