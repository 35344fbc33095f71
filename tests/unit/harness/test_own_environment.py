"""Tests end the same whatever the user's shell, cluster or launcher has set."""

from pathlib import Path

from huggingface_hub import constants

from tests.support.launching import ENGINES_CACHES
from tests.support.own_environment import leave_out_the_users

OF_A_CLUSTER = {
    **{"HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_x", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    **{
        "WANDB_MODE": "offline",
        "VLLM_CPU_KVCACHE_SPACE": "7",
        "VLLM_PLUGINS": "",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    },
    **{"RANK": "3", "WORLD_SIZE": "8", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "node0"},
    **{
        "GRPO_LOG": "debug",
        "GRPO_OUTPUT_DIR": "theirs",
        "COLUMNS": "40",
        "TZ": "Asia/Kolkata",
        "PYTHONWARNINGS": "error",
    },
}
KEPT = {
    **{"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2", "GLOO_SOCKET_IFNAME": "lo", "https_proxy": "proxy:1"},
    **{"VLLM_CACHE_ROOT": "/cache", "GRPO_TEST_SLURM": "install", "GRPO_TRL_CHECKOUT": "/trl", "GRPO_GPU_REPORT": "a"},
}


def test_environment_of_tests_drops_user_settings() -> None:
    environment = {**OF_A_CLUSTER, **KEPT, "HF_HOME": "/home/user/huggingface"}
    leave_out_the_users(environment)
    home = environment.pop("HF_HOME")
    assert environment == KEPT
    assert "user" not in home


def test_hf_home_of_tests_is_in_engines_caches() -> None:
    assert Path(constants.HF_HOME).is_relative_to(ENGINES_CACHES)
