"""Whose memory fills a device, where one has run out of it: this job's, or that of others; when it is free again."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OTHERS_SHARE = 0.02  # of the device: contexts of tools that only look do not count

FREE_AGAIN = 0.995  # of what was free before: tools that only look come and go
POLL_S = 0.1

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# torch's and vLLM's own words for what they asked for, and torch's for the device.
_ASKED = re.compile(r"(?:Tried to allocate|memory utilization \([\d.]+,) ([\d.]+ [KMG]iB)")
_HELD = re.compile(
    r"total capacity of ([\d.]+ [KMG]iB) of which ([\d.]+ [KMG]iB) is free.*this process has ([\d.]+ [KMG]iB)",
    re.DOTALL,
)
_IDLE = re.compile(r"([\d.]+ [KMG]iB) is reserved by PyTorch but unallocated")
_DEVICE = re.compile(r"\bGPU (\d+) has|device cuda:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device."""

    total: int
    free: int
    own: int
    """Of this process, which has the device to itself: ranks and engines share none."""
    others: int
    """Of all other processes."""

    def is_short_of_others(self, asked: int | None) -> bool:
        """Whether `asked` would fit if the others were gone; None: not known how much."""
        return self.others > OTHERS_SHARE * self.total and (asked is None or asked <= self.free + self.others)


def asked_bytes(text: str) -> int | None:
    """What an error of torch's or vLLM's says was asked for."""
    found = _ASKED.search(text)
    return _bytes_of(found[1]) if found else None


def idle_bytes(text: str) -> int:
    """What torch keeps without using it, by its error; 0 where that does not say."""
    found = _IDLE.search(text)
    return _bytes_of(found[1]) if found else 0


def memory_in(text: str) -> DeviceMemory | None:
    """The figures in torch's error; None without, and where the driver names no processes, as in containers."""
    found = _HELD.search(text)
    total, free, own = map(_bytes_of, found.groups()) if found else (0, 0, 0)
    return DeviceMemory(total=total, free=free, own=own, others=total - free - own) if 0 < own <= total - free else None


def _bytes_of(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * _UNITS[unit])


def device_in(text: str) -> int:
    """The device, as this process counts them, that an error names; 0 without one: an engine's worker has one."""
    found = _DEVICE.search(text)
    return int(found[1] or found[2]) if found else 0


def read_memory(device: int) -> DeviceMemory | None:
    """By NVML, which opens no context; None where it does not say, as in containers that see no other's processes."""
    try:
        name = [*os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), ""][device].strip() or str(device)
        pynvml, handle = _open(name)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        held = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        own = held.pop(os.getpid())
        return DeviceMemory(total=int(memory.total), free=int(memory.free), own=int(own), others=sum(held.values()))
    except Exception:  # noqa: BLE001  no NVML, no such GPU, no figures of processes: nothing is known
        return None


def _open(name: str) -> tuple[Any, Any]:
    """NVML, and its handle of a device, as CUDA_VISIBLE_DEVICES names it."""
    import pynvml

    pynvml.nvmlInit()
    find = pynvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
    return pynvml, find(int(name) if name.isdecimal() else name)


def free_bytes(devices: Sequence[str]) -> list[int]:
    """Of each device, as CUDA_VISIBLE_DEVICES names it; [] where NVML does not say."""
    try:
        opened = [_open(name) for name in devices]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for pynvml, handle in opened]
    except Exception:  # noqa: BLE001  as for `read_memory`
        return []


def wait_until_free(devices: Sequence[str], before: Sequence[int], timeout_s: float) -> bool:
    """Until the devices have as much memory free as before somebody used them; False where the time is up.

    The driver gives a killed process's memory back seconds after its end, and what processes share when the last of
    them has let go.

    Args:
        before: as `free_bytes` gave it.
    """
    deadline = time.monotonic() + timeout_s
    while any(now < FREE_AGAIN * then for now, then in zip(free_bytes(devices), before, strict=False)):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
