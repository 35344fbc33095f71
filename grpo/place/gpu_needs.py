"""Software needed by GPUs: a recent driver, and for Triton's kernels a C compiler and Python.h.

Engines on CPUs need libnuma. Without these checks all of them fail late: torch asks the driver at its first CUDA call;
Triton compiles a C module before its first kernel, minutes into the start (3.7 and 3.9, `runtime/build.py`), in engines
and in ranks.
"""

import ctypes
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

OLDEST_BRANCH = {11: 450, 12: 525, 13: 580}
"""Oldest branch of the driver by CUDA's major version; all minor versions run on it.
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
_DRIVER_VERSION = Path("/sys/module/nvidia/version")


class Unmet(NamedTuple):
    """One unmet need of GPUs."""

    what: str
    fix: str


def unmet_needs(
    build: str | None, env: Mapping[str, str], *, driver: str | None = None, include: Path | None = None
) -> list[Unmet]:
    """List a first kernel's unmet needs on this node; empty without any.

    Args:
        build: the backend torch is built for, 'CUDA 13.0'. The driver is checked for CUDA alone.
        env: CC, PATH, CPATH and C_INCLUDE_PATH are read.
        driver: version of the driver, '580.65.06'; '' skips the check. None: the loaded driver's.
        include: the folder of Python.h. None: this Python's.
    """
    needs = (
        _unmet_driver(build, read_driver() if driver is None else driver),
        _unmet_compiler(env),
        _unmet_header(env, _include_folder() if include is None else include),
    )
    return [need for need in needs if need is not None]


def unmet_cpu_need() -> Unmet | None:
    """Return the unmet need of vLLM's CPU kernels on this node; None if met.

    vLLM only warns when importing its kernels fails; its worker fails later, on a missing operator (0.31).
    """
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return Unmet(
            "no libnuma.so.1, which vLLM's kernels for CPUs are linked with [GRPO-111]",
            "apt install libnuma1 (dnf install numactl-libs)",
        )
    return None


def read_driver() -> str:
    """Version of the loaded NVIDIA driver, '580.65.06'; '' if there is none or its version is unknown."""
    try:
        return _DRIVER_VERSION.read_text().strip()
    except OSError:
        return ""


def needed_branch(build: str | None) -> int | None:
    """Oldest driver branch that supports a torch built for `build`; None if unknown."""
    return OLDEST_BRANCH.get(_cuda_major(build))


def _cuda_major(build: str | None) -> int:
    """Major version: 13 for 'CUDA 13.0'; 0 for builds without CUDA."""
    maker, _, version = (build or "").partition(" ")
    return int(version.partition(".")[0]) if maker == "CUDA" else 0


def served_cuda() -> int:
    """Major CUDA version supported by libcuda; above the driver's own with a cuda-compat package. 0 without libcuda.
    Does not initialise CUDA."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    failed = libcuda.cuDriverGetVersion(ctypes.byref(version))
    return 0 if failed else version.value // 1000


def nccl_doubt(env: Mapping[str, str]) -> Unmet | None:
    """Return an NCCL setting with which a dying engine may take the trainer down; None if all is well."""
    value = env.get("NCCL_CUMEM_ENABLE", "")
    if value.strip() != "0":
        return None
    return Unmet(
        f"NCCL_CUMEM_ENABLE={value}: NCCL then shares memory by CUDA IPC, and an engine that is killed in the middle "
        "of a weight sync may take the trainer's GPU along with a CUDA error; the default, cuMem, keeps what is shared "
        "until the communicator is aborted, and the engine is started again",
        "unset NCCL_CUMEM_ENABLE: vLLM sets it no longer",
    )


def _unmet_driver(build: str | None, driver: str) -> Unmet | None:
    branch, needed = driver.partition(".")[0], needed_branch(build)
    if build is None or needed is None or not branch.isdecimal() or int(branch) >= needed:
        return None
    if served_cuda() >= _cuda_major(build):
        return None
    version = build.split()[1]
    compat = f"cuda-compat-{version.replace('.', '-')}"
    return Unmet(
        f"the NVIDIA driver is {driver}, but torch is built for {build}, which needs {needed} or newer [GRPO-108]",
        f"have branch {needed} or a newer one installed, or take nodes that have it; on data-centre GPUs {compat} is "
        f"enough (apt install {compat}, and /usr/local/cuda-{version}/compat in LD_LIBRARY_PATH)",
    )


def _unmet_compiler(env: Mapping[str, str]) -> Unmet | None:
    """Check for a C compiler as Triton does: CC alone if it is set; `cc` is never tried."""
    named, path = env.get("CC"), env.get("PATH")
    names = ("gcc", "clang") if named is None else (named,)
    if any(shutil.which(name, path=path) for name in names):
        return None
    seen = "CC is unset, and there is no gcc and no clang" if named is None else f"CC={named} is no program"
    return Unmet(
        f"no C compiler: {seen} on PATH={path}; Triton compiles C before its first kernel [GRPO-109]",
        "apt install gcc (dnf install gcc), or name one that is there: export CC=/path/to/cc",
    )


def _include_folder() -> Path:
    """Folder of Python.h as Triton finds it: Debian's own scheme names a folder without headers."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))


def _unmet_header(env: Mapping[str, str], include: Path) -> Unmet | None:
    beside = f"{env.get('CPATH', '')}:{env.get('C_INCLUDE_PATH', '')}".split(":")  # where compilers look too
    if any((folder / "Python.h").is_file() for folder in (include, *map(Path, filter(None, beside)))):
        return None
    version = sysconfig.get_python_version()
    return Unmet(
        f"no Python.h in {include}, which Triton compiles with before its first kernel [GRPO-110]",
        f"apt install python{version}-dev (dnf install python{version}-devel), or make the environment with a Python "
        "that carries it: uv's own do (uv venv --managed-python)",
    )
