"""GPUs of this process, by the names for an engine's CUDA_VISIBLE_DEVICES; errors for missing ones.

    python -m grpo.place.devices [--config_file FILE] ARGUMENTS OF train.py...

prints the number of GPUs torch sees, for the scripts in launch/. It exits with 1 if GPUs are expected and missing.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence

from grpo.place.files import is_on, read_wishes
from grpo.place.gpu_needs import needed_branch, read_driver, unmet_needs

UUID_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")
_BESIDE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # of ROCm alone


class DeviceMistake(ValueError):
    """GPUs are missing, or engines cannot use them."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}: {fix}")
        self.what, self.fix = what, fix


def visible_devices(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return `device_tokens` of the GPUs torch counts, without initialising CUDA."""
    import torch

    return device_tokens(env, torch.cuda.device_count(), rocm=torch.version.hip is not None)


def device_tokens(env: Mapping[str, str], device_count: int, *, rocm: bool = False) -> tuple[str, ...]:
    """Return one entry for a child's CUDA_VISIBLE_DEVICES per GPU of this process, in device order.

    A child's value replaces the inherited one: device i of this process is entry i of the inherited list (an id or a
    GPU UUID), not "i". As in CUDA, the list ends at the first negative entry, entry of another kind, or duplicate. CUDA
    refuses more than that (a device that does not exist; the whole list if an entry repeats), so entries beyond
    `device_count` are dropped.

    Args:
        rocm: torch is built for ROCm.

    Raises:
        DeviceMistake: there are fewer entries than devices; entries are MIG slices; or, with `rocm`,
            HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES is set as well.
    """
    if rocm:
        _refuse_other_lists(env)
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return tuple(str(index) for index in range(device_count))
    if value.strip().startswith("MIG-"):
        # vLLM turns an entry into a number by nvmlDeviceGetIndex, which NVML has for whole GPUs alone (0.31,
        # platforms/cuda.py).
        raise DeviceMistake(
            f"CUDA_VISIBLE_DEVICES is {value!r}, but vLLM cannot serve on slices of a GPU (MIG) [GRPO-106]",
            "ask for whole GPUs (Slurm: --gres=gpu:N without a MIG type; Kubernetes: nvidia.com/gpu), or have MIG "
            "turned off (nvidia-smi -mig 0, as root) and name the GPUs by number or UUID",
        )
    is_uuid = value.strip().startswith("GPU-")
    tokens: list[str] = []
    for entry in value.split(","):
        if is_uuid:
            token = entry.strip() if entry.strip().startswith("GPU-") else None
        else:  # CUDA reads "1x" as 1, and stops at "-1", "" and "x"
            number = re.match(r"\+?([0-9]+)", entry.strip())
            token = str(int(number[1])) if number else None
        if token is None or token in tokens:
            break
        if is_uuid and len(token) < UUID_LENGTH:
            raise DeviceMistake(
                f"CUDA_VISIBLE_DEVICES names a GPU by the beginning of its UUID, {token}, and vLLM wants all of it",
                "write whole UUIDs (nvidia-smi -L), or numbers",
            )
        tokens.append(token)
    if len(tokens) < device_count:
        raise DeviceMistake(
            f"torch sees {device_count} GPUs, but CUDA_VISIBLE_DEVICES={value!r} names {len(tokens)}",
            "set it before the script starts and do not change it afterwards",
        )
    return tuple(tokens[:device_count])


def _refuse_other_lists(env: Mapping[str, str]) -> None:
    """Refuse HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES: engines get their GPUs by CUDA_VISIBLE_DEVICES.

    HIP reads CUDA_VISIBLE_DEVICES too, unless one of its own lists is set. With HIP_VISIBLE_DEVICES set, vLLM stops
    ("Inconsistent GPU visibility env vars", 0.31, platforms/rocm.py). With ROCR_VISIBLE_DEVICES set, torch ignores
    CUDA_VISIBLE_DEVICES (2.13, `_parse_visible_devices`), while HIP counts relative to ROCR's list.
    """
    found = {name: env[name] for name in _BESIDE if env.get(name)}
    if not found:
        return
    shown, names = " ".join(f"{name}={value}" for name, value in found.items()), " ".join(found)
    devices = next(iter(found.values())) if len(found) == 1 else "THE GPUS OF THIS JOB"
    raise DeviceMistake(
        f"the environment has {shown}, but an engine is given its GPUs by CUDA_VISIBLE_DEVICES, which ROCm reads as "
        "well and which must be the only list",
        f"export CUDA_VISIBLE_DEVICES={devices}; unset {names}",
    )


def torch_build() -> str | None:
    """Backend torch is built for: 'CUDA 12.9', 'ROCm 7.0'; None for a build without GPUs."""
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def count_gpus(env: Mapping[str, str], *, use_cpu: bool) -> int:
    """Return `seen_gpus` for a job about to start, and check the GPUs' needs: driver, C compiler, Python.h.

    Raises:
        DeviceMistake: as `seen_gpus`, or one of these needs is missing.
    """
    count = seen_gpus(env, use_cpu=use_cpu)
    if count and (unmet := unmet_needs(torch_build(), env)):
        first, *others = unmet
        raise DeviceMistake(first.what, "; ".join([first.fix, *(f"{what}: {fix}" for what, fix in others)]))
    return count


def seen_gpus(env: Mapping[str, str], *, use_cpu: bool) -> int:
    """Count the GPUs of a job on this machine: 0 with `use_cpu`, or if accelerate asks for CPUs (ACCELERATE_USE_CPU).

    Args:
        use_cpu: the user asked for CPUs, in any file or flag.

    Raises:
        DeviceMistake: torch is built for GPUs and sees none, or engines cannot use those it sees.
    """
    if use_cpu or is_on(env.get("ACCELERATE_USE_CPU")) or (build := torch_build()) is None:
        return 0
    import torch

    # With a driver too old to use them, `device_count` still counts some by NVML.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device_tokens(env, count, rocm=build.startswith("ROCm"))
    if count:
        return count
    lists = {name: env[name] for name in ("CUDA_VISIBLE_DEVICES", *_BESIDE) if name in env}
    shown = " ".join(f"{name}={value!r}" for name, value in lists.items()) or "CUDA_VISIBLE_DEVICES is unset"
    driver = "nvidia-smi"
    if needed := needed_branch(build):
        loaded = read_driver()
        driver += f"; {build} needs {needed} or newer" + (loaded and f", and {loaded} is loaded")
    raise DeviceMistake(
        f"torch is built for {build}, but sees no GPU ({shown}) [GRPO-101]",
        "ask the scheduler for them (Slurm: --gres=gpu:8 or --gpus-per-node=8; Kubernetes: nvidia.com/gpu: 8), look at "
        f"CUDA_VISIBLE_DEVICES and at the driver ({driver}), or write use_cpu: true (--use_cpu) to train on CPUs",
    )


def main(argv: Sequence[str]) -> int:
    try:
        sys.stdout.write(f"{count_gpus(os.environ, use_cpu=read_wishes(argv).use_cpu)}\n")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
