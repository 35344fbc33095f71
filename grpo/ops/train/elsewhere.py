"""A job's `GRPOConfig` in a process outside the job: starts nothing, joins no group."""

from typing import ClassVar

import torch

from grpo.config import GRPOConfig


class ConfigElsewhere(GRPOConfig):
    """`GRPOConfig` as on a rank of the job, with all its checks; a refusal is kept, not raised.

    Transformers creates the process group and selects a device in its arguments; this class does neither.
    """

    ranks: ClassVar[int] = 1
    """Ranks of the job; set on a subclass."""
    refusal: str | None = None
    """Reason for which the trainer would stop at start; derived fields may then be missing."""
    deepspeed_file: "str | dict | None" = None
    """Value of `--deepspeed`. Loading it would enable ZeRO-3 in this process."""

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
