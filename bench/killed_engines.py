"""`train.py` whose engine is killed in a generation every `KILL_EVERY` steps: what `bench.engine_restart` trains
with."""

import os
import signal
from typing import Any

from grpo.engine.client import EngineClient
from grpo.engine.messages import Sample
from grpo.ops.train.script import main
from grpo.trainer import GRPOTrainer

EVERY = int(os.environ["KILL_EVERY"])
killed: set[int] = set()


class MortalEngine(EngineClient):
    version = 0

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        value = super().call(method, timeout_s, **kwargs)
        if method == "finish_weight_update":
            self.version = int(kwargs["weight_version"])
        return value

    def submit(self, sample: Sample) -> None:
        super().submit(sample)
        if self.version and self.version % EVERY == 0 and self.version not in killed:
            killed.add(self.version)
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    GRPOTrainer.start_engine = MortalEngine
    main()
