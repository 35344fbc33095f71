"""Environment of an engine host: inherited variables, without a launcher's and secrets."""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

# Variables of launchers for their ranks. An engine that saw them would join the trainer's rendezvous: for example
# TORCHELASTIC_USE_AGENT_STORE makes every rank a client of the agent's store, and vLLM's own group hangs.
_LAUNCHER = re.compile(
    "((LOCAL_|GROUP_)?(RANK|WORLD_SIZE))|MASTER_ADDR|MASTER_PORT|NODE_RANK|OMP_NUM_THREADS|TORCH_FR_DUMP_TEMP_FILE|"
    "(ROLE|TORCHELASTIC|PET|ACCELERATE|FSDP|OMPI|PMI|PMIX)_.*"
)
# Keys of trackers, clouds and services are for the trainer only; the Hub's are needed to load the model.
_SECRET = re.compile(".*(SECRET|PASSW|CREDENTIAL|(^|_)(TOKEN|KEY|KEYS|PAT|JWT|AUTH)(_|$)).*", re.IGNORECASE)
_HUB_TOKENS = ("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN")
MORE_VARIABLE = "GRPO_ENGINE_ENV"  # secrets that engines inherit as well, separated by commas; `NAME*` for a prefix


def engine_environment(
    inherited: Mapping[str, str],
    *,
    devices: Sequence[str],
    tensor_parallel_size: int,
    engines_per_node: int,
    dtype: str | None = None,
) -> dict[str, str]:
    """Make the environment of an engine host: the inherited one without a launcher's variables and secrets, plus
    devices.

    Args:
        devices: values for CUDA_VISIBLE_DEVICES; empty on a machine without GPUs.
        dtype: of the engine, by vLLM's name; None: not known yet.
    """
    allowed = [*_HUB_TOKENS, *filter(None, map(str.strip, inherited.get(MORE_VARIABLE, "").split(",")))]
    env = {
        name: value
        for name, value in without_launcher(inherited).items()
        if not _SECRET.fullmatch(name) or any(fnmatchcase(name, pattern) for pattern in allowed)
    }
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # DeepSpeed sets it in a rank on import, vLLM always
    # vLLM's processes are forked from the host, with everything imported: 2 s instead of 13 s on two cores. vLLM itself
    # falls back to spawn if CUDA is already initialised.
    env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # as TRL's import sets it
    # Compiled kernels outlive an engine, but its temporary folder, their default place, does not.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(own_folder("torchinductor")))
    if "VLLM_PLUGINS" in env and "grpo" not in env["VLLM_PLUGINS"].split(","):
        env["VLLM_PLUGINS"] = ",".join(filter(None, [env["VLLM_PLUGINS"], "grpo"]))
    env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    # vLLM keeps compiled files, on GPUs inductor's kernels too, under this folder. The default is in the home, which
    # all nodes may share, and vLLM writes parts in place (0.31, `compilation/backends.py`).
    env.setdefault("VLLM_CACHE_ROOT", f"{own_folder('vllm')}/{devices[0] if devices else 'cpu'}")
    if devices:
        if tensor_parallel_size > 1:
            _drop_expandable_segments(env)
        if dtype == "float32":
            # By default Triton multiplies float32 in TF32, also in vLLM's attention (0.31): verification of a float32
            # trainer would fail.
            env.setdefault("TRITON_F32_DEFAULT", "ieee")
        return env
    cores = sorted(os.sched_getaffinity(0))
    if tensor_parallel_size > 1:
        # Without a core list per worker vLLM stops with "Not enough allowed NUMA nodes" (0.31).
        lists = [cores[rank::tensor_parallel_size] or cores[:1] for rank in range(tensor_parallel_size)]
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, part)) for part in lists))
    else:
        # The ranks wait during generation: let the engine use their cores, without binding.
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env["OMP_NUM_THREADS"] = str(max(1, len(cores) // engines_per_node))
    # On CPUs vLLM finds its saved compiled model, fails to load it ("'function' object has no attribute
    # 'finalize_loading'", 0.31, if inductor is called without vLLM's own backend), and compiles again: 23 s of
    # processor time per engine. Without it torch's own cache is used: 19 s.
    env.setdefault("VLLM_USE_AOT_COMPILE", "0")
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning idle threads take cores from the training ranks
    return env


def without_launcher(inherited: Mapping[str, str]) -> dict[str, str]:
    """Remove a launcher's variables, for a process other than a rank: with them it would join the ranks' rendezvous."""
    return {name: value for name, value in inherited.items() if not _LAUNCHER.fullmatch(name)}


def own_folder(name: str) -> Path:
    """Lasting folder of this user on this node: /tmp/NAME_UID, or one in the home if another user owns the name: its
    files are executed."""
    folder = Path(tempfile.gettempdir()) / f"{name}_{os.getuid()}"  # a user need not have a name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_ours else Path.home() / ".cache" / "grpo" / folder.name


def _drop_expandable_segments(env: dict[str, str]) -> None:
    """Remove a setting of the trainer's allocator from an engine's environment.

    With it workers cannot share the buffers of their CUDA graphs (`cudaIpcGetMemHandle` refuses such memory), and end
    after graph capture without a message (vLLM 0.31, `custom_all_reduce.py`).
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in env:
            kept = [part for part in env[name].split(",") if not part.strip().startswith("expandable_segments")]
            env[name] = ",".join(kept)
