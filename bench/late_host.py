"""`train.py` whose engine's host starts with its engine, not before: what `bench.startup` compares with."""

from grpo.engine import early


def start_no_host() -> None:
    """In place of `start_host`, here and in `GRPOTrainer`."""


if __name__ == "__main__":
    early.start_host = start_no_host
    from grpo.ops.train.script import main

    main()
