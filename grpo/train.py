"""`accelerate launch -m grpo.train --config FILE`: same as `train.py`. Without a model it runs the demo."""

from grpo.engine.early import start_host

if __name__ == "__main__":
    start_host()  # first: it imports vLLM while this process imports the trainer
    from grpo.ops.train.script import main

    main()
