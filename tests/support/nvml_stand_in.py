"""A stand-in for `pynvml`: its functions by their names, over GPUs that a test makes up, with its own errors.

    python -m tests.support.nvml_stand_in

prints what a sample of 8 GPUs costs in Python: NVML's own time comes on top.
"""

import sys
import time
import types
from dataclasses import dataclass, field
from typing import Any

import pynvml

from grpo.record.timeline.usage import UsageSampler

ERRORS = ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_DRIVER_NOT_LOADED")


@dataclass(kw_only=True)
class MadeUpGpu:
    uuid: str
    busy_percent: int = 0
    used: int = 0
    power_mw: int = 0
    name: str = "NVIDIA H100 80GB HBM3"
    failing: dict[str, int] = field(default_factory=dict)
    """NVML's error code by the function that raises it."""
    asked: int = 0


class StandIn(types.ModuleType):
    """NVML of a node with `gpus`, by their number on the bus; `slices` are found by their UUID alone.

    Handles are opaque, as the real ones: the index in a tuple.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *gpus: MadeUpGpu, slices: tuple[MadeUpGpu, ...] = (), init_error: int | None = None) -> None:
        super().__init__("pynvml")
        self.gpus, self.slices, self.init_error = gpus, slices, init_error
        self.is_initialised = False
        for name in ERRORS:
            setattr(self, name, getattr(pynvml, name))

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.is_initialised = True

    def _check(self) -> None:
        if not self.is_initialised:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self._check()
        if not 0 <= index < len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return ("handle", self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._check()
        for gpu in (*self.gpus, *self.slices):
            if gpu.uuid == uuid:  # the whole of it, or nothing
                return ("handle", gpu)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def _asked(self, handle: Any, function: str) -> MadeUpGpu:
        self._check()
        gpu: MadeUpGpu = handle[1]
        gpu.asked += 1
        if function in gpu.failing:
            raise pynvml.NVMLError(gpu.failing[function])
        return gpu

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._asked(handle, "nvmlDeviceGetName").name

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu = self._asked(handle, "nvmlDeviceGetUtilizationRates").busy_percent
        return rates

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        memory = pynvml.c_nvmlMemory_t()
        memory.total, memory.used = 80 * 2**30, self._asked(handle, "nvmlDeviceGetMemoryInfo").used
        memory.free = memory.total - memory.used
        return memory

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._asked(handle, "nvmlDeviceGetPowerUsage").power_mw


def main(num_gpus: int = 8, num_samples: int = 2000) -> None:
    sys.modules["pynvml"] = StandIn(*(MadeUpGpu(uuid=f"GPU-{index}") for index in range(num_gpus)))
    usage = UsageSampler(
        attempt=0,
        devices=[str(index) for index in range(num_gpus)],
        processes=dict,
        put=lambda record: None,
        interval_s=0,
    )
    list(usage.sample())
    begin = time.perf_counter()
    records = sum(len(list(usage.sample())) for _ in range(num_samples))
    took_s = time.perf_counter() - begin
    assert records == (num_gpus + 1) * num_samples
    print(f"{took_s / num_samples * 1e6:.0f} microseconds for a sample of {num_gpus} GPUs and the node")


if __name__ == "__main__":
    main()
