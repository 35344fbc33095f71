"""Out-of-memory errors of a device: who holds the memory, in which phase, and the setting to lower it."""

import os
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo.faults.failure import with_causes

OTHERS_SHARE = 0.02  # of the device: contexts of monitoring tools do not count

FREE_AGAIN = 0.995  # of the memory free before: monitoring tools come and go
POLL_S = 0.1

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Phrases of torch and vLLM: the requested bytes, and torch's figures for the device.
_ASKED = re.compile(r"(?:Tried to allocate|memory utilization \([\d.]+,) ([\d.]+ [KMG]iB)")
_HELD = re.compile(
    r"total capacity of ([\d.]+ [KMG]iB) of which ([\d.]+ [KMG]iB) is free.*this process has ([\d.]+ [KMG]iB)",
    re.DOTALL,
)
_IDLE = re.compile(r"([\d.]+ [KMG]iB) is reserved by PyTorch but unallocated")
_DEVICE = re.compile(r"\bGPU (\d+) has|device cuda:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device in bytes."""

    total: int
    free: int
    own: int
    """Held by this process. Ranks and engines share no device."""
    others: int
    """Held by all other processes."""

    def is_short_of_others(self, asked: int | None) -> bool:
        """True if `asked` bytes would fit without the other processes; None means an unknown amount."""
        return self.others > OTHERS_SHARE * self.total and (asked is None or asked <= self.free + self.others)


def asked_bytes(text: str) -> int | None:
    """Requested bytes in an error of torch or vLLM; None if not named."""
    found = _ASKED.search(text)
    return _bytes_of(found[1]) if found else None


def idle_bytes(text: str) -> int:
    """Bytes torch has reserved but not allocated, by its error; 0 if not named."""
    found = _IDLE.search(text)
    return _bytes_of(found[1]) if found else 0


def memory_in(text: str) -> DeviceMemory | None:
    """Memory figures in torch's error; None without them, or if the driver lists no processes, as in containers."""
    found = _HELD.search(text)
    total, free, own = map(_bytes_of, found.groups()) if found else (0, 0, 0)
    return DeviceMemory(total=total, free=free, own=own, others=total - free - own) if 0 < own <= total - free else None


def _bytes_of(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * _UNITS[unit])


def device_in(text: str) -> int:
    """Device index in an error, as this process counts devices; 0 if not named: an engine's worker has one device."""
    found = _DEVICE.search(text)
    return int(found[1] or found[2]) if found else 0


def read_memory(device: int) -> DeviceMemory | None:
    """Read the memory by NVML, which opens no context; None if unknown, as in containers that hide other processes."""
    try:
        name = [*os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), ""][device].strip() or str(device)
        pynvml, handle = _open(name)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        held = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        own = held.pop(os.getpid())
        return DeviceMemory(total=int(memory.total), free=int(memory.free), own=int(own), others=sum(held.values()))
    except Exception:  # noqa: BLE001  no NVML, no such GPU, no figures of processes: unknown
        return None


def _open(name: str) -> tuple[Any, Any]:
    """Return pynvml and its handle of a device, named as in CUDA_VISIBLE_DEVICES."""
    import pynvml

    pynvml.nvmlInit()
    find = pynvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
    return pynvml, find(int(name) if name.isdecimal() else name)


def free_bytes(devices: Sequence[str]) -> list[int]:
    """Free bytes of each device, named as in CUDA_VISIBLE_DEVICES; [] without NVML."""
    try:
        opened = [_open(name) for name in devices]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for pynvml, handle in opened]
    except Exception:  # noqa: BLE001  as in `read_memory`
        return []


def wait_until_free(devices: Sequence[str], before: Sequence[int], timeout_s: float) -> bool:
    """Wait until the devices have as much free memory as before their use; False on timeout.

    The driver returns a killed process's memory seconds after its end, and shared memory after the last owner's.

    Args:
        before: result of `free_bytes`.
    """
    deadline = time.monotonic() + timeout_s
    while any(now < FREE_AGAIN * then for now, then in zip(free_bytes(devices), before, strict=False)):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


_REST_OF_TORCHS = re.compile(r" GPU \d+ has a total capacity.*", re.DOTALL)


_ROWS = "halve per_device_train_batch_size and double gradient_accumulation_steps"
_STATES = "train on more ranks, or offload the optimizer as configs/4node_offload.yaml does"
_SAMPLING = "lower vllm_gpu_memory_utilization, or max_num_batched_tokens in vllm_engine_kwargs"
_OLD = f"{_ROWS}, or set old_logprobs to engine, which leaves this forward pass out"

PHASES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    # Name, `path:function` of a frame, and the remedy. The first row with a matching frame counts; inner phases come
    # first.
    ("a weight sync", re.compile(r"/grpo/weights/"), "lower vllm_sync_bucket_mb, or set vllm_sync_backend to shm"),
    ("a checkpoint", re.compile(r":(_save_checkpoint|save_model)$"), "set zero3_save_16bit_model to false"),
    ("a reward", re.compile(r"/grpo/rewards/|:_calculate_rewards$"), "score fewer rows at a time, or on a GPU apart"),
    ("the optimizer step", re.compile(r"/(deepspeed|optim)/.*:(step|initialize)$"), _STATES),
    ("the backward pass", re.compile(r":backward$"), f"{_ROWS}, or set attn_implementation to flash_attention_2"),
    ("sampling", re.compile(r"/vllm/.*:execute_model$"), _SAMPLING),
    ("an engine's start", re.compile(r"/vllm/"), "lower vllm_max_model_length, or raise vllm_tensor_parallel_size"),
    ("the old log-probabilities", re.compile(r":_generate_and_score_completions$"), _OLD),
    ("the forward pass", re.compile(r":compute_loss$"), f"{_ROWS}, or lower max_completion_length"),
    ("loading a model", re.compile(r":from_pretrained$"), f"{_STATES}; beta 0 needs no second model"),
)


def phase_of(error: BaseException) -> tuple[str, str]:
    """Return (phase, remedy), from the frames of an error and of its causes."""
    walked = (frame for each in with_causes(error) for frame, _ in traceback.walk_tb(each.__traceback__))
    frames = [f"{frame.f_code.co_filename}:{frame.f_code.co_name}" for frame in walked]
    found = ((name, lower) for name, of_frame, lower in PHASES if any(map(of_frame.search, frames)))
    return next(found, ("training", f"{_ROWS}, or {_STATES}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of an out-of-memory error for the user."""

    is_others: bool
    """True if the request would fit without other processes."""
    text: str
    """Error text, without torch's figures if `lines` has them."""
    lines: list[str]
    """Known figures, and advice."""


def explain(error: BaseException) -> Explanation:
    text = "\n".join(str(each) for each in with_causes(error))
    device, asked, shown, lines = device_in(text), asked_bytes(text), str(error), []
    memory = read_memory(device) or memory_in(text)
    if memory is not None:
        shown = _REST_OF_TORCHS.sub("", shown)
        figures = (
            f"device {device}, in GiB: asked for {_gib(asked)}, free {_gib(memory.free)} of {_gib(memory.total)}, "
        )
        lines.append(figures + f"held by this process {_gib(memory.own)}, by others {_gib(memory.others)}")
        if memory.is_short_of_others(asked):
            return Explanation(is_others=True, text=shown, lines=lines)
    (phase, lower), idle = phase_of(error), idle_bytes(text)
    if asked is not None and idle >= asked:
        lower = f"torch keeps {_gib(idle)} GiB in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True; or {lower}"
    lines.append(f"in {phase} [GRPO-631]: {lower}")
    lines.append("docs/out_of_memory.md has more for each phase, `grpo plan` with this job's files what each needs")
    return Explanation(is_others=False, text=shown, lines=lines)


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**30:.2f}"
