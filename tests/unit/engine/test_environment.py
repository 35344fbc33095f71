"""What an engine host inherits, and what it must not see."""

import os
import signal
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo.engine.environment import engine_environment, own_folder
from grpo.engine.process import deaf_to_sigchld
from grpo.faults.sessions import WatchedProcess

LAUNCHED = {
    "PATH": "/bin",
    "HF_HOME": "/data",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "TORCH_FR_DUMP_TEMP_FILE": "/tmp/x",
    "OMP_NUM_THREADS": "1",
    "NCCL_SOCKET_IFNAME": "eth0",
}


def environment(extra: dict[str, str] | None = None, *, devices: tuple[str, ...] = (), size: int = 1, engines: int = 1):
    return engine_environment(
        {**LAUNCHED, **(extra or {})}, devices=devices, tensor_parallel_size=size, engines_per_node=engines
    )


def test_engine_environment_drops_launcher_and_keeps_user_settings() -> None:
    env = environment(devices=("6", "GPU-abc"))
    gone = LAUNCHED.keys() - env.keys()
    assert gone == LAUNCHED.keys() - {"PATH", "HF_HOME", "NCCL_SOCKET_IFNAME"}
    assert env["CUDA_VISIBLE_DEVICES"] == "6,GPU-abc"
    assert env["NCCL_SOCKET_IFNAME"] == "eth0"  # trainer and engine must agree on NCCL's settings
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "WANDB_API_KEY",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "KUBE_TOKEN",
            "GITHUB_PAT",
        ),
        *("GOOGLE_APPLICATION_CREDENTIALS", "PGPASSWORD", "azure_client_secret", "SLURM_JWT", "REGISTRY_AUTH_FILE"),
    ],
)
def test_engine_environment_passes_secrets_only_when_named(name: str) -> None:
    assert name not in environment({name: "secret"})
    assert environment({name: "secret", "GRPO_ENGINE_ENV": f"OTHER, {name}"})[name] == "secret"
    assert environment({name: "secret", "GRPO_ENGINE_ENV": f"{name[:4]}*"})[name] == "secret"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TOKENIZERS_PARALLELISM", "VLLM_LOGGING_LEVEL", "https_proxy"),
        *("LD_LIBRARY_PATH", "CPATH", "SITE_CLUSTER_MODULES", "SLURM_JOB_ID", "KEYBOARD", "ROLES"),
    ],
)
def test_engine_environment_passes_ordinary_variables(name: str) -> None:
    assert environment({name: "x"})[name] == "x"


def test_engine_environment_never_passes_launcher_variables() -> None:
    assert "RANK" not in environment({"GRPO_ENGINE_ENV": "RANK,*"}), "it would join the trainer's rendezvous"


def test_own_folder_made_by_other_user_falls_back_to_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    ours = own_folder("kernels")
    assert (ours.parent, stat.S_IMODE(ours.stat().st_mode)) == (tmp_path, 0o700)
    assert own_folder("kernels") == ours
    in_the_home = tmp_path / "home" / ".cache" / "grpo" / ours.name
    ours.chmod(0o777)
    assert own_folder("kernels") == in_the_home, "anyone may write into it"
    ours.rmdir()
    ours.symlink_to(tmp_path)
    assert own_folder("kernels") == in_the_home
    ours.unlink()
    own_folder("kernels")
    ours.rename(tmp_path / "kernels_12345")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert own_folder("kernels") == in_the_home.with_name("kernels_12345"), "another's"


def test_vllm_plugins_when_set_include_grpo() -> None:
    assert "VLLM_PLUGINS" not in environment()
    assert environment({"VLLM_PLUGINS": "theirs"})["VLLM_PLUGINS"] == "theirs,grpo"
    assert environment({"VLLM_PLUGINS": "grpo"})["VLLM_PLUGINS"] == "grpo"
    assert environment({"VLLM_PLUGINS": ""})["VLLM_PLUGINS"] == "grpo"


def test_engine_environment_without_gpus_assigns_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert environment()["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment(engines=2)["OMP_NUM_THREADS"] == "2"
    assert environment(size=2)["VLLM_CPU_OMP_THREADS_BIND"] == "0,2|1,3"
    assert environment({"VLLM_CPU_OMP_THREADS_BIND": "all"})["VLLM_CPU_OMP_THREADS_BIND"] == "all"


def test_expandable_segments_for_engine_of_several_gpus_are_removed() -> None:
    others = ("max_split_size_mb:512", "roundup_power2_divisions:[256:1,>:4]")
    conf = {"PYTORCH_CUDA_ALLOC_CONF": ",".join([others[0], "expandable_segments:True", others[1]])}
    for devices in (("6", "7"), ("GPU-a", "GPU-b")):
        env = environment(conf, devices=devices, size=2)
        assert env["PYTORCH_CUDA_ALLOC_CONF"] == ",".join(others)
    assert (
        environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, devices=("6", "7"), size=2)[
            "PYTORCH_ALLOC_CONF"
        ]
        == ""
    )
    assert environment(conf, devices=("7",))["PYTORCH_CUDA_ALLOC_CONF"] == conf["PYTORCH_CUDA_ALLOC_CONF"]


def test_vllm_cache_root_by_default_is_local_and_per_device() -> None:
    folders = [environment(devices=devices)["VLLM_CACHE_ROOT"] for devices in [("6",), ("7",), ()]]
    assert len(set(folders)) == 3
    assert all(folder.startswith(tempfile.gettempdir()) for folder in folders)
    assert environment({"VLLM_CACHE_ROOT": "/fast"}, devices=("6",))["VLLM_CACHE_ROOT"] == "/fast"


def test_watched_process_wait_on_ended_process_returns_true() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert WatchedProcess(gone.pid).wait(0)


def test_deaf_to_sigchld_in_other_thread_keeps_handler() -> None:
    def end() -> object:
        with deaf_to_sigchld():
            return signal.getsignal(signal.SIGCHLD)

    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        with ThreadPoolExecutor() as threads:
            assert threads.submit(end).result() is signal.getsignal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_triton_f32_default_for_float32_on_gpus_is_ieee() -> None:
    """Triton would multiply it in TF32."""

    def of(dtype: str, devices: tuple[str, ...] = ("0",), **inherited: str) -> dict[str, str]:
        return engine_environment(inherited, devices=devices, tensor_parallel_size=1, engines_per_node=1, dtype=dtype)

    assert of("float32")["TRITON_F32_DEFAULT"] == "ieee"
    assert of("float32", TRITON_F32_DEFAULT="tf32x3")["TRITON_F32_DEFAULT"] == "tf32x3"
    assert "TRITON_F32_DEFAULT" not in of("bfloat16") | of("float32", devices=())
