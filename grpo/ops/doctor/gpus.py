"""GPUs of one node: their number, and processes using them. Reported, never ended."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo.ops.doctor.records import Finding
from grpo.place.devices import DeviceMistake
from grpo.place.gpu_needs import nccl_doubt, unmet_needs

MIB, GIB = 1 << 20, 1 << 30
IDLE_BYTES = GIB  # more than a driver holds on an idle GPU
ENGINE_SHARE = 0.9  # default share of a GPU's memory for an engine (vllm_gpu_memory_utilization)
QUERY_S = 15.0  # nvidia-smi takes up to 10 s on a node without its persistence daemon
_GPU_FIELDS = "index,uuid,driver_version,memory.used,memory.total"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """One GPU, from nvidia-smi."""

    index: int
    """Index in nvidia-smi, in the order of PCI addresses."""
    uuid: str
    driver: str
    used_bytes: int
    total_bytes: int


Processes = Mapping[str, Sequence[str]]
"""Processes by their GPU's uuid: pid, name and, if reported, memory."""


def query_gpus() -> tuple[list[NodeGpu], Processes]:
    """Query nvidia-smi; both results are empty without it. Raises subprocess.SubprocessError if it fails or hangs."""
    try:
        gpus, processes = _nvidia_smi("gpu", _GPU_FIELDS), _nvidia_smi("compute-apps", _PROCESS_FIELDS)
    except FileNotFoundError:
        return [], {}
    return parse_gpus(gpus), parse_processes(processes)


def _nvidia_smi(what: str, fields: str) -> str:
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_S).stdout


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _memory_bytes(cell: str) -> int:
    return int(cell) * MIB if cell.isdigit() else 0  # `[N/A]`, `[Not Supported]`, `[Insufficient Permissions]`


def parse_gpus(text: str) -> list[NodeGpu]:
    gpus = []
    for index, uuid, driver, used, total in _cells(text):
        gpus.append(
            NodeGpu(
                index=int(index),
                uuid=uuid,
                driver=driver,
                used_bytes=_memory_bytes(used),
                total_bytes=_memory_bytes(total),
            )
        )
    return gpus


def parse_processes(text: str) -> Processes:
    """Parse processes; nvidia-smi reports no memory in containers, under MIG, and for other users."""
    processes: dict[str, list[str]] = {}
    for uuid, pid, *name, used in _cells(text):  # a name may contain commas
        held = f" ({_memory_bytes(used) / GIB:.1f} GiB)" if used.isdigit() else ""
        processes.setdefault(uuid, []).append(f"pid {pid} {', '.join(name)}{held}")
    return processes


def visible_gpus(gpus: Sequence[NodeGpu], visible_devices: str | None) -> list[NodeGpu]:
    """GPUs left by CUDA_VISIBLE_DEVICES; all of them if it is unset or names MIG slices, which are refused
    elsewhere."""
    entries = [entry.strip() for entry in (visible_devices or "").split(",")]
    if visible_devices is None or any(entry.startswith("MIG-") for entry in entries):
        return list(gpus)
    uuids = tuple(entry for entry in entries if entry.startswith("GPU-"))
    return [gpu for gpu in gpus if str(gpu.index) in entries or gpu.uuid.startswith(uuids)]


def check_gpu_count(
    *, seen: int, asked: int | None, gpus: Sequence[NodeGpu], mistake: DeviceMistake | None = None
) -> Finding:
    """Compare the GPUs torch sees (`seen`) with the requested number and with nvidia-smi's (`gpus`).

    Args:
        mistake: error that would end the job at its start; `seen` is then 0.
    """
    if mistake is not None:
        shown = f"; nvidia-smi shows {len(gpus)} of them" if gpus else ""
        return Finding.fail("gpus", mistake.what + shown, mistake.fix)
    if gpus and not seen:
        fix = "install a CUDA build of torch: make install BACKEND=cuda in a new environment"
        return Finding.fail("gpus", f"nvidia-smi shows {len(gpus)} GPUs, torch {torch.__version__} sees none", fix)
    if asked is not None and seen < asked:
        fix = "ask the scheduler for them (Slurm: --gpus-per-node, and srun without --gpus-per-task), or look at "
        return Finding.fail("gpus", f"{seen} of {asked} GPUs visible", fix + "CUDA_VISIBLE_DEVICES and the driver")
    if asked is not None and seen > asked:
        fix = "every GPU without a rank is reserved for engines: set CUDA_VISIBLE_DEVICES if that is not meant"
        return Finding.warn("gpus", f"{seen} GPUs visible, {asked} asked for", fix)
    if seen == 1:
        fix = "a rank trains on one GPU while an engine generates on another: make two visible"
        return Finding.warn("gpus", "1 GPU visible", fix)
    return Finding.passed("gpus", f"{seen} visible" if seen else "none: this node runs on CPU")


def check_gpu_memory(gpus: Sequence[NodeGpu], processes: Processes) -> list[Finding]:
    """Report memory of the visible `gpus` already in use, and its owners."""
    findings = []
    for gpu in gpus:
        who = ", ".join(processes.get(gpu.uuid, ()))
        if gpu.used_bytes < IDLE_BYTES and not who:
            continue
        message = f"GPU {gpu.index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB taken by "
        message += who or "processes that cannot be seen from here"
        fix = "end them if they are yours, else ask for another node"
        if gpu.used_bytes > (1 - ENGINE_SHARE) * gpu.total_bytes:
            fix += f"; an engine takes {ENGINE_SHARE:.0%} of a GPU"
            findings.append(Finding.fail("gpu memory", message, fix))
        else:
            findings.append(Finding.warn("gpu memory", message, fix))
    if gpus and not findings:
        findings.append(Finding.passed("gpu memory", f"{len(gpus)} GPUs idle"))
    return findings


def check_needs(build: str, env: Mapping[str, str], *, driver: str) -> list[Finding]:
    """Check the needs of kernels on GPUs, and a setting of NCCL; for a node with GPUs.

    Args:
        build: the backend torch is built for.
        driver: its version; '' if nvidia-smi does not report it.
    """
    unmet = unmet_needs(build, env, driver=driver or None)
    found = [Finding.fail("kernels", *need) for need in unmet]
    if not found:
        found.append(Finding.passed("kernels", f"driver {driver or 'unknown'}, a C compiler and Python.h"))
    if doubt := nccl_doubt(env):
        found.append(Finding.warn("nccl memory", *doubt))
    return found
