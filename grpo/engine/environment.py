"""The environment of an engine host: what it inherits, and what it must not see."""

import getpass
import os
import tempfile
from collections.abc import Mapping, Sequence

# What a launcher sets for its ranks. An engine that saw it would join the trainer's rendezvous:
# TORCHELASTIC_USE_AGENT_STORE, for one, makes every rank a client of the agent's store, and vLLM's own group hangs.
_LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
_LAUNCHER_VARIABLES |= {"MASTER_ADDR", "MASTER_PORT", "TORCH_FR_DUMP_TEMP_FILE", "OMP_NUM_THREADS"}
_LAUNCHER_PREFIXES = ("ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")


def engine_environment(
    inherited: Mapping[str, str], *, devices: Sequence[str], tensor_parallel_size: int, engines_per_node: int
) -> dict[str, str]:
    """The environment of an engine host: the inherited one without the launcher's variables, with its own devices.

    Args:
        devices: values for CUDA_VISIBLE_DEVICES; empty on a machine without GPUs.
    """
    env = {
        name: value
        for name, value in inherited.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    env["PYTHONUNBUFFERED"] = "1"
    # vLLM's processes come out of the host by fork, with everything imported: 2 s instead of 13 s on two cores. vLLM
    # itself turns to spawn where CUDA is already initialised.
    env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # as TRL sets it in whoever imports TRL
    # Compiled kernels outlive an engine; its folder for temporary files, where they would go, does not.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    if "VLLM_PLUGINS" in env and "grpo" not in env["VLLM_PLUGINS"].split(","):
        env["VLLM_PLUGINS"] = ",".join(filter(None, [env["VLLM_PLUGINS"], "grpo"]))
    env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if devices:
        # vLLM keeps what it compiles, inductor's kernels too, under this folder, in the home by default: one that all
        # nodes share, and it writes parts of it in place (0.31, `compilation/backends.py`).
        env.setdefault("VLLM_CACHE_ROOT", f"{tempfile.gettempdir()}/vllm_{getpass.getuser()}/{devices[0]}")
        if tensor_parallel_size > 1:
            _drop_expandable_segments(env)
        return env
    cores = sorted(os.sched_getaffinity(0))
    if tensor_parallel_size > 1:
        # Without a core list per worker vLLM stops with "Not enough allowed NUMA nodes" (0.31).
        lists = [cores[rank::tensor_parallel_size] or cores[:1] for rank in range(tensor_parallel_size)]
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, part)) for part in lists))
    else:
        # The ranks wait while the engine generates: let it use their cores, bound to none.
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env["OMP_NUM_THREADS"] = str(max(1, len(cores) // engines_per_node))
    # On CPUs vLLM finds the model that it has compiled and saved before, fails to load it ("'function' object has no
    # attribute 'finalize_loading'", 0.31, where inductor is called without vLLM's own backend), and compiles again:
    # 23 s of processor time for an engine. Without it torch's own cache serves: 19 s.
    env.setdefault("VLLM_USE_AOT_COMPILE", "0")
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads that spin take the cores from the ranks that train
    return env


def _drop_expandable_segments(env: dict[str, str]) -> None:
    """Take a setting of the trainer's allocator out of an engine's environment.

    With it workers cannot give each other their CUDA graphs' buffers (`cudaIpcGetMemHandle` refuses such memory), and
    end after graph capture without a word (vLLM 0.31, `custom_all_reduce.py`).
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in env:
            kept = [part for part in env[name].split(",") if not part.strip().startswith("expandable_segments")]
            env[name] = ",".join(kept)
