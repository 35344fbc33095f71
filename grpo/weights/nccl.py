"""The trainer's side of the NCCL backend: vLLM's own sender, with a deadline.

The built-in sender waits in `stream.synchronize()` without end when a worker is gone (vLLM 0.31). Aborting the
communicator from another thread ends that wait.
"""

import threading
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from grpo.engine.plugin import NCCL_BACKEND


@dataclass
class NodeNCCLInitInfo(NCCLTrainerInitInfo):
    """The push group of one node: the local main is rank 0, the workers of its engines follow."""

    backend: ClassVar[str] = NCCL_BACKEND


class NodeNCCLSender(NCCLTrainerWeightTransferEngine):
    """Sends to all engines of the node over one small communicator."""

    init_info_cls = NodeNCCLInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: NCCLTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if torch.cuda.is_available():
            # vLLM's `current_stream()` makes a side stream current, for good, unless it has seen one being set (0.31).
            torch.cuda.set_stream(torch.cuda.current_stream())
        sender = super().trainer_init(init_info, client=client, source=source)
        # vLLM goes on without NCCL when it cannot load it, and its broadcasts then do nothing.
        if getattr(sender.model_update_group, "disabled", False):
            raise RuntimeError("vLLM could not load NCCL in the trainer: set vllm_sync_backend to 'shm', or mend NCCL")
        return sender

    def send_within(self, timeout_s: float) -> None:
        """`send_weights`, aborted after `timeout_s`."""
        timer = threading.Timer(timeout_s, self.abort)
        timer.daemon = True
        timer.start()
        try:
            self.send_weights()
        finally:
            timer.cancel()

    def abort(self) -> None:
        """End every operation on the push group, from any thread; the group cannot be used again."""
        if self.model_update_group is not None:
            self.model_update_group.destroy()

    def shutdown(self) -> None:
        self.abort()
        super().shutdown()
