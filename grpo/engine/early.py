"""Early start of an engine host: it imports vLLM in parallel with the trainer's imports, before its engine is known.

Call `start_host` first in a training script, before anything slow. The first engine built on this node takes the host.
An unused host ends with this process, or by `drop_host`.
"""

import atexit
import contextlib
import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from grpo.engine.environment import engine_environment
from grpo.engine.process import HostProcess
from grpo.place.launch import read_launch
from grpo.place.log import FILE_ONLY

_log = logging.getLogger(__name__)

# Variables that vLLM, torch and their dependencies may read on import. They must be as at the start of the host;
# others, such as a tracker's, reach the engine when it is built.
_READ_AT_IMPORT = re.compile(
    "(VLLM|HF|HUGGING|TRANSFORMERS|TOKENIZERS|TORCH|PYTORCH|TRITON|CUDA|CUBLAS|NVIDIA|NCCL|GLOO|OMP|MKL|KMP|PYTHON|LD_|XDG)"
    ".*|PATH|HOME|TMPDIR"
)
# Exceptions that are read only when the engine is built.
_READ_LATE = {"CUDA_VISIBLE_DEVICES", "VLLM_CACHE_ROOT", "VLLM_CPU_OMP_THREADS_BIND"}
_READ_LATE |= {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_F32_DEFAULT"}

_waiting: HostProcess | None = None
_taking = threading.Lock()  # two engines may restart at once
_was_taken = False
_starter = 0  # pid; a forked child holds no host


def start_host() -> None:
    """Start a host, if this process is its node's local main and has no waiting one.

    Call it from the main thread. It touches no device and raises no errors: problems with the launch, the devices or
    vLLM are reported when an engine is started.
    """
    if (guess := _guess(os.environ)) is not None:
        stand_by(guess)


def start_first_host() -> None:
    """Call `start_host`, unless this process has already started an engine: later ones may never be needed."""
    if not _was_taken:
        start_host()


def stand_by(environment: Mapping[str, str]) -> None:
    """Keep a host waiting for the next engine start, unless one waits already; costs about 1 GB of memory.

    Args:
        environment: of the engine.
    """
    global _waiting, _starter
    if _holds_one():
        return
    with contextlib.suppress(OSError):  # reported when an engine is started
        _waiting, _starter = HostProcess(environment), os.getpid()
        atexit.register(drop_host)


def take_host(environment: Mapping[str, str]) -> HostProcess:
    """Return the waiting host, if its environment fits the engine's `environment`, or a new one."""
    global _was_taken
    with _taking:
        _was_taken = True
        host = _given_up()
    if host is None:
        return HostProcess(environment)
    if host.is_running():
        if not (changed := _changed(host.environment, environment)):
            return host
        text = "%s changed after vLLM was imported for the engine, which imports it anew"
        _log.info(text, ", ".join(changed), extra=FILE_ONLY)
    host.close()
    return HostProcess(environment)


def drop_host() -> None:
    """End the waiting host, if there is one."""
    with _taking:
        host = _given_up()
    if host is not None:
        host.close()


def _given_up() -> HostProcess | None:
    """Pop the waiting host. None in a forked child, which must not touch its parent's."""
    global _waiting
    host = None
    if _holds_one():
        host, _waiting = _waiting, None
    return host


def _holds_one() -> bool:
    return _waiting is not None and os.getpid() == _starter


def _changed(seen: Mapping[str, str], needed: Mapping[str, str]) -> list[str]:
    """Variables that a host for an engine in `needed` would have read differently."""
    names = sorted(name for name in seen.keys() | needed.keys() if seen.get(name) != needed.get(name))
    return [name for name in names if _READ_AT_IMPORT.fullmatch(name) and name not in _READ_LATE]


def _guess(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Guess the environment of this node's last engine, assuming one device; None if this process starts no engine.

    Works without torch, whose import takes seconds. A wrong guess only wastes the host: another one is started.
    """
    try:
        launch = read_launch(environment)
    except ValueError:
        return None
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        gpus = [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    else:
        gpus = [name.strip() for name in names.split(",") if name.strip()]
    if launch.local_rank != 0 or (gpus and len(gpus) <= launch.local_world_size):
        return None
    return engine_environment(environment, devices=gpus[-1:], tensor_parallel_size=1, engines_per_node=1)
