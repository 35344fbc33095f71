"""A job's `GRPOConfig`, read by a process that is no rank of the job: nothing is started, no group is joined."""

from typing import ClassVar

import torch

from grpo.config import GRPOConfig


class ConfigElsewhere(GRPOConfig):
    """`GRPOConfig` as it is on a rank of the job, with all its checks; what it refuses is kept, not raised.

    Transformers makes the process group and takes a device where it makes its arguments: neither of them here.
    """

    ranks: ClassVar[int] = 1
    """Of the job; set on a subclass."""
    refusal: str | None = None
    """Why the trainer would stop at start; fields that are worked out may then be missing."""
    deepspeed_file: "str | dict | None" = None
    """What `--deepspeed` names. Loading it would switch ZeRO-3 on in this process."""

    def __post_init__(self) -> None:
        self.deepspeed_file = vars(self)["deepspeed"]
        self.deepspeed = None
        use_cpu, self.use_cpu = self.use_cpu, True  # nothing is asked of this machine's GPUs
        try:
            super().__post_init__()
        except ValueError as error:
            self.refusal = str(error)
        self.use_cpu = use_cpu

    @property
    def num_ranks(self) -> int:
        return self.ranks

    world_size = num_ranks

    @property
    def _setup_devices(self) -> torch.device:
        self.distributed_state, self._n_gpu = None, 0
        return torch.device("cpu")
