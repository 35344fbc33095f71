"""A job whose placement and batch stand: all that its estimates depend on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo.config.models import choose_backend
from grpo.ops.plan.batch import PlannedBatch
from grpo.ops.plan.images import Images
from grpo.ops.plan.job import Launcher, PlannedConfig, zero_of
from grpo.ops.plan.model_shape import ModelShape
from grpo.ops.plan.sync_memory import WeightSyncShape
from grpo.ops.plan.zero_memory import Sharding, read_sharding
from grpo.place.topology import NodeTopology
from grpo.preflight.lora import LoraChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the cluster has, as told or assumed."""

    gpu_bytes: int | None
    """Memory of one GPU; None when the job runs without."""
    tflops: float
    """Of one GPU: trillions of operations a second in the dtype of training."""
    tbps: float
    """Terabytes a second from one GPU's memory."""
    is_a100: bool = False
    """Whether that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob:
    """All that the estimates depend on."""

    args: PlannedConfig
    launcher: Launcher
    nodes: Sequence[NodeTopology]
    batch: PlannedBatch
    hardware: Hardware
    shape: ModelShape
    sync: WeightSyncShape
    dtype: torch.dtype
    """In which trainer and engines compute (`engine_settings.compute_dtype`)."""
    loaded_dtype: torch.dtype
    """In which the model is loaded (`engine_settings.loaded_dtype`)."""
    lora: LoraChoice | None
    adapter_elements: int
    """Of an engine's space for adapters (`PlannedLora.engine_elements`)."""
    flash_attention: bool
    reward_parameters: int
    """Of the reward model; 0 without one."""
    images: Images | None = None
    """Of its prompts."""

    @property
    def has_gpus(self) -> bool:
        return self.hardware.gpu_bytes is not None

    @property
    def backend(self) -> str:
        """Of the weight sync: "nccl" or "shm"."""
        return choose_backend(self.args.vllm_sync_backend, has_gpus=self.has_gpus)

    @property
    def gathers_on_device(self) -> bool:
        """Whether ZeRO-3's shards travel by NCCL."""
        return self.has_gpus and self.args.ddp_backend != "gloo"

    @property
    def model_bytes(self) -> int:
        """Of one copy in the dtype of the engines."""
        return self.shape.engine_parameters * self.dtype.itemsize

    def sharding(self) -> Sharding:
        """Of the launcher's DeepSpeed, else of the training file's.

        Raises:
            ValueError: its file cannot be read.
        """
        return read_sharding(
            zero_of(self.launcher, self.args),
            hidden_size=self.shape.hidden_size,
            world_size=self.launcher.num_processes,
            dtype_bytes=self.dtype.itemsize,
            loaded_bytes=self.loaded_dtype.itemsize,
        )
