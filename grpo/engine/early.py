"""An engine host that starts before it is known what it is to run: vLLM is imported beside the trainer's own imports.

`start_host` comes first in a training script, before anything slow. The first engine that is built on this node takes
the host, whoever builds it; one that nobody takes ends with this process, or with `drop_host`.
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

# What vLLM, torch and what they load may read while they are imported. It has to be as it was when the host started;
# other variables, a tracker's say, reach the engine with all the rest when it is built.
_READ_AT_IMPORT = re.compile(
    "(VLLM|HF|HUGGING|TRANSFORMERS|TOKENIZERS|TORCH|PYTORCH|TRITON|CUDA|CUBLAS|NVIDIA|NCCL|GLOO|OMP|MKL|KMP|PYTHON|LD_|XDG)"
    ".*|PATH|HOME|TMPDIR"
)
# What of it is read only when the engine is built.
_READ_LATE = {"CUDA_VISIBLE_DEVICES", "VLLM_CACHE_ROOT", "VLLM_CPU_OMP_THREADS_BIND"}
_READ_LATE |= {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_F32_DEFAULT"}

_waiting: HostProcess | None = None
_taking = threading.Lock()  # two engines may come back at once
_was_taken = False
_starter = 0  # pid; a child that is forked off holds no host


def start_host() -> None:
    """Start a host, where this process is its node's local main and has none that waits.

    From the main thread. It touches no device, and this process learns nothing of it: what is wrong with the launch,
    the devices or vLLM is reported by whoever needs an engine.
    """
    if (guess := _guess(os.environ)) is not None:
        stand_by(guess)


def start_first_host() -> None:
    """As `start_host`, for a process whose engines have not been started yet: later ones may never be needed."""
    if not _was_taken:
        start_host()


def stand_by(environment: Mapping[str, str]) -> None:
    """Have a host wait for the next engine that has to be started, unless one waits: it needs about 1 GB of memory.

    Args:
        environment: of that engine.
    """
    global _waiting, _starter
    if _holds_one():
        return
    with contextlib.suppress(OSError):  # reported where it matters, when an engine is started
        _waiting, _starter = HostProcess(environment), os.getpid()
        atexit.register(drop_host)


def take_host(environment: Mapping[str, str]) -> HostProcess:
    """The host that waits, if it has seen what an engine in `environment` has to see, or a new one."""
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
    """End the host that waits, if there is one: nobody will need it."""
    with _taking:
        host = _given_up()
    if host is not None:
        host.close()


def _given_up() -> HostProcess | None:
    """The host that waits, out of our hands; a forked child has none, and keeps its parent's hands off."""
    global _waiting
    host = None
    if _holds_one():
        host, _waiting = _waiting, None
    return host


def _holds_one() -> bool:
    return _waiting is not None and os.getpid() == _starter


def _changed(seen: Mapping[str, str], needed: Mapping[str, str]) -> list[str]:
    """Variables that an engine in `needed` would have read otherwise."""
    names = sorted(name for name in seen.keys() | needed.keys() if seen.get(name) != needed.get(name))
    return [name for name in names if _READ_AT_IMPORT.fullmatch(name) and name not in _READ_LATE]


def _guess(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The environment of this node's last engine if it has one device; None where this process will start none.

    Without torch, which takes seconds to import. A wrong guess costs the host, and no more: another one is started.
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
