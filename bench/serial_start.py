"""`train.py` whose engines are ready before a model is loaded: the start that `bench.startup` compares with."""

from typing import Any

from bench.late_host import start_no_host
from grpo.engine import early

START_S = 600.0


def start_ready_engine(*args: Any, **kwargs: Any) -> Any:
    """An engine that takes work when this returns. The node's other ranks wait for it where they load the model."""
    from grpo.engine.client import EngineClient

    client = EngineClient(*args, **kwargs)
    client.wait_ready(START_S)
    return client


if __name__ == "__main__":
    early.start_host = start_no_host
    from grpo.ops.train.script import main
    from grpo.trainer import GRPOTrainer

    GRPOTrainer.start_engine = staticmethod(start_ready_engine)
    main()
