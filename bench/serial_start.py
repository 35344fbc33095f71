"""`train.py` whose ranks wait for the engines before they go on: the start that `bench.startup` compares with."""

from typing import Any

import torch.distributed as dist

import grpo.trainer
from grpo.config import GRPOConfig
from grpo.local_vllm import LocalVLLM
from grpo.recipes.script import main


class SerialStart(LocalVLLM):
    """Engines that are ready when the constructor returns, on every rank."""

    def __init__(self, args: GRPOConfig, *rest: Any, **kwargs: Any) -> None:
        super().__init__(args, *rest, **kwargs)
        for client in self._clients or []:
            client.wait_ready(args.vllm_start_timeout, self._watch.check)
        if dist.is_initialized():
            dist.barrier()


if __name__ == "__main__":
    grpo.trainer.LocalVLLM = SerialStart  # type: ignore[misc]
    main()
