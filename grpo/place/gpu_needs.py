"""What GPUs need beside them: a driver that is new enough, and for Triton's kernels a C compiler and Python.h.

And what engines on CPUs need: libnuma. All are missed late otherwise: torch asks the driver at its first CUDA call, and
before its first kernel, minutes into the start, Triton compiles a module in C (3.7 and 3.9, `runtime/build.py`), in
engines and in ranks.
"""

import ctypes
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

OLDEST_BRANCH = {11: 450, 12: 525, 13: 580}
"""Of the driver, by CUDA's major version; all its minor versions run on that branch.
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
_DRIVER_VERSION = Path("/sys/module/nvidia/version")


class Unmet(NamedTuple):
    """One thing that is not as GPUs need it."""

    what: str
    fix: str


def unmet_needs(
    build: str | None, env: Mapping[str, str], *, driver: str | None = None, include: Path | None = None
) -> list[Unmet]:
    """What a node with GPUs lacks to run a first kernel; empty where it has all.

    Args:
        build: what torch is built for, 'CUDA 13.0'; of another than CUDA the driver is not judged.
        env: CC, PATH, CPATH and C_INCLUDE_PATH count.
        driver: its version, '580.65.06'; '' is not judged. None: the one that is loaded.
        include: the folder of Python.h. None: this Python's.
    """
    needs = (
        _unmet_driver(build, read_driver() if driver is None else driver),
        _unmet_compiler(env),
        _unmet_header(env, _include_folder() if include is None else include),
    )
    return [need for need in needs if need is not None]


def unmet_cpu_need() -> Unmet | None:
    """What a node without GPUs lacks to run vLLM's kernels; None where it has all.

    vLLM's own import of them fails with a warning alone, and its worker later by an operator that is not there (0.31).
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
    """Version of the NVIDIA driver that the kernel has loaded, '580.65.06'; '' where it has none, or does not say."""
    try:
        return _DRIVER_VERSION.read_text().strip()
    except OSError:
        return ""


def needed_branch(build: str | None) -> int | None:
    """The oldest branch of the driver that serves a torch built for `build`; None where that is not known."""
    return OLDEST_BRANCH.get(_cuda_major(build))


def _cuda_major(build: str | None) -> int:
    """13 of 'CUDA 13.0'; 0 of what is none."""
    maker, _, version = (build or "").partition(" ")
    return int(version.partition(".")[0]) if maker == "CUDA" else 0


def served_cuda() -> int:
    """The major version of CUDA that libcuda serves: a newer one than the driver's own with a package cuda-compat. 0
    where there is no libcuda. Does not initialise CUDA."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    failed = libcuda.cuDriverGetVersion(ctypes.byref(version))
    return 0 if failed else version.value // 1000


def nccl_doubt(env: Mapping[str, str]) -> Unmet | None:
    """A setting of NCCL with which an engine's death may end the trainer too; None where there is none."""
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
    """Triton takes CC alone where it is set, and looks for no `cc`."""
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
    """As Triton asks for it: Debian's own scheme names a folder without headers."""
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
