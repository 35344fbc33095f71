"""A job with its placement and batch: the input of all estimates."""

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
    """GPUs of the cluster, given or assumed."""

    gpu_bytes: int | None
    """Memory of one GPU; None without GPUs."""
    tflops: float
    """Throughput of one GPU in the training dtype, in TFLOPS."""
    tbps: float
    """Memory bandwidth of one GPU, in TB/s."""
    is_a100: bool = False
    """True if the GPU is known to be an A100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob:
    """Input of all estimates."""

    args: PlannedConfig
    launcher: Launcher
    nodes: Sequence[NodeTopology]
    batch: PlannedBatch
    hardware: Hardware
    shape: ModelShape
    sync: WeightSyncShape
    dtype: torch.dtype
    """Compute dtype of trainer and engines (`engine_settings.compute_dtype`)."""
    loaded_dtype: torch.dtype
    """Dtype in which the model is loaded (`engine_settings.loaded_dtype`)."""
    lora: LoraChoice | None
    adapter_elements: int
    """Elements of an engine's LoRA slots (`PlannedLora.engine_elements`)."""
    flash_attention: bool
    reward_parameters: int
    """Parameters of the reward model; 0 without one."""
    images: Images | None = None
    """Images of its prompts."""

    @property
    def has_gpus(self) -> bool:
        return self.hardware.gpu_bytes is not None

    @property
    def backend(self) -> str:
        """Backend of the weight sync: "nccl" or "shm"."""
        return choose_backend(self.args.vllm_sync_backend, has_gpus=self.has_gpus)

    @property
    def gathers_on_device(self) -> bool:
        """True if ZeRO-3's shards are gathered by NCCL."""
        return self.has_gpus and self.args.ddp_backend != "gloo"

    @property
    def model_bytes(self) -> int:
        """Size of one copy of the model in the engines' dtype."""
        return self.shape.engine_parameters * self.dtype.itemsize

    def sharding(self) -> Sharding:
        """Sharding by the launcher's DeepSpeed section, else by the training file's.

        Raises:
            ValueError: the file cannot be read.
        """
        return read_sharding(
            zero_of(self.launcher, self.args),
            hidden_size=self.shape.hidden_size,
            world_size=self.launcher.num_processes,
            dtype_bytes=self.dtype.itemsize,
            loaded_bytes=self.loaded_dtype.itemsize,
        )
