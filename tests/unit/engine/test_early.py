"""Which host starts before its engine is known, and which engine takes it. No host runs here."""

import os
from pathlib import Path

import pytest

from grpo.engine import early
from grpo.engine.environment import engine_environment
from tests.support.engines import MadeUpHost

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def start_host(environment: dict[str, str]) -> None:
    """As in a process with this environment."""
    with pytest.MonkeyPatch.context() as process:
        process.setattr(os, "environ", environment)
        early.start_host()


def needed(environment: dict[str, str], *, devices: tuple[str, ...] = (), engines: int = 1) -> dict[str, str]:
    return engine_environment(environment, devices=devices, tensor_parallel_size=1, engines_per_node=engines)


def test_take_host_gives_early_host_to_first_engine_only(hosts: list[MadeUpHost]) -> None:
    environment = {**LAUNCHED, "CUDA_VISIBLE_DEVICES": ""}
    start_host(environment)
    start_host(environment)  # one waits already
    assert len(hosts) == 1
    assert early.take_host(needed(environment)) is hosts[0]
    assert early.take_host(needed(environment)) is hosts[1]
    early.drop_host()
    assert [host.runs for host in hosts] == [True, True]
    start_host(environment)  # of the next trainer
    early.drop_host()
    assert [host.runs for host in hosts] == [True, True, False]


@pytest.mark.parametrize(
    "environment",
    [
        {**LAUNCHED, "RANK": "1", "LOCAL_RANK": "1"},
        {**LAUNCHED, "CUDA_VISIBLE_DEVICES": "0,1"},  # none is left for an engine: the trainer says so
        {"RANK": "0"},
    ],
    ids=["another-rank", "no-gpu-left", "half-a-launch"],
)
def test_start_host_in_process_without_engine_starts_none(environment: dict[str, str], hosts: list[MadeUpHost]) -> None:
    start_host(environment)
    assert not hosts


def test_start_host_sees_gpu_of_last_engine(hosts: list[MadeUpHost], monkeypatch: pytest.MonkeyPatch) -> None:
    start_host({**LAUNCHED, "CUDA_VISIBLE_DEVICES": "4, 5,GPU-a,GPU-b"})
    assert hosts[0].environment["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    taken = early.take_host(needed({**LAUNCHED, "CUDA_VISIBLE_DEVICES": "4,5,GPU-a,GPU-b"}, devices=("GPU-a",)))
    assert taken is hosts[0]  # the other one comes in time
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{index}") for index in range(3)])
    start_host(LAUNCHED)
    assert hosts[1].environment["CUDA_VISIBLE_DEVICES"] == "2"


def test_take_host_after_changed_vllm_settings_starts_new_host(
    hosts: list[MadeUpHost], caplog: pytest.LogCaptureFixture
) -> None:
    environment = {**LAUNCHED, "CUDA_VISIBLE_DEVICES": "", "HF_HOME": "/here"}
    for changed in ({"HF_HOME": "/there"}, {"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"}):
        start_host(environment)
        waiting = hosts[-1]
        with caplog.at_level("INFO"):
            taken = early.take_host(needed(environment | changed))
        assert next(iter(changed)) in caplog.messages[-1]
        assert taken is hosts[-1] is not waiting
        assert not waiting.runs
    start_host(environment)
    waiting = hosts[-1]
    assert early.take_host(needed(environment, engines=os.cpu_count() or 2)) is hosts[-1] is not waiting
    late = {"VLLM_CACHE_ROOT": "/fast", "WANDB_RUN_ID": "x", "ACCELERATE_USE_DEEPSPEED": "true"}
    late |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    start_host(environment)
    waiting = hosts[-1]
    assert early.take_host(needed(environment | late)) is waiting


def test_take_host_after_end_of_early_host_starts_new_host(hosts: list[MadeUpHost]) -> None:
    environment = {**LAUNCHED, "CUDA_VISIBLE_DEVICES": ""}
    start_host(environment)
    hosts[0].runs = False
    assert early.take_host(needed(environment)) is hosts[1]


def test_drop_host_in_forked_process_leaves_host_running(
    hosts: list[MadeUpHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**LAUNCHED, "CUDA_VISIBLE_DEVICES": ""}
    start_host(environment)
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        early.drop_host()
        assert early.take_host(needed(environment)) is hosts[1]
    assert early.take_host(needed(environment)) is hosts[0]
    assert hosts[0].runs
