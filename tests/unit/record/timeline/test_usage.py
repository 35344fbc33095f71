"""What devices use: the right GPU by whatever name, trees of processes, and a thread that disturbs nothing."""

import os
import queue
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pynvml
import pytest
import torch

from grpo.record.timeline.records import Usage
from grpo.record.timeline.usage import Processes, UsageSampler
from tests.support.nvml_stand_in import MadeUpGpu, StandIn

GPUS = [f"GPU-{index}{index}aa-bbbb" for index in range(4)]


def node(**changes: Any) -> StandIn:
    return StandIn(
        *(MadeUpGpu(uuid=uuid, busy_percent=10 * index, used=index, power_mw=1500) for index, uuid in enumerate(GPUS)),
        **changes,
    )


@pytest.fixture(autouse=True)
def own_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test puts there, the next one finds the real one."""
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)


def sampler(
    devices: tuple[str, ...],
    nvml: types.ModuleType | None,
    say: Callable[[str], None] = pytest.fail,
    processes: Callable[[], Mapping[str, int]] = dict,
    own_device: str | None = None,
) -> UsageSampler:
    """Without a thread: a test takes the samples. With that module for `pynvml`; None: there is none."""
    sys.modules["pynvml"] = nvml  # type: ignore[assignment]
    return UsageSampler(
        attempt=3,
        devices=devices,
        processes=processes,
        put=lambda record: None,
        interval_s=0,
        own_device=own_device,
        clock=lambda: 7.5,
        say=say,
    )


def by_device(sampler: UsageSampler) -> dict[str, Usage]:
    return {record.device: record for record in sampler.sample()}


@pytest.mark.parametrize(
    ("devices", "index"),
    [
        (("2", "3"), 2),  # CUDA_VISIBLE_DEVICES=2,3: the number is NVML's, not the place in the list
        (("3", "1"), 3),
        ((GPUS[2],), 2),
    ],
)
def test_usage_sampler_finds_gpu_by_index_or_uuid(devices: tuple[str, ...], index: int) -> None:
    nvml = node()
    reported = by_device(sampler(devices, nvml))
    assert list(reported) == ["node", *devices]
    assert reported[devices[0]] == Usage(
        attempt=3,
        time=7.5,
        device=devices[0],
        busy=index / 10,
        memory_bytes=index,
        memory_total_bytes=80 * 2**30,
        power_w=1.5,
    )
    ours = {int(name) if name.isdecimal() else index for name in devices}
    assert {number for number, gpu in enumerate(nvml.gpus) if gpu.asked > 1} == ours


def test_usage_of_mig_slice_has_no_utilisation() -> None:
    unsupported = {
        "nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED,
        "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NOT_SUPPORTED,
    }
    nvml = node(slices=(MadeUpGpu(uuid="MIG-1-2-3", used=5, failing=unsupported),))
    reported = by_device(sampler(("MIG-1-2-3",), nvml))["MIG-1-2-3"]
    assert (reported.busy, reported.memory_bytes, reported.power_w) == (None, 5, None)


def test_usage_sampler_with_failing_gpu_reports_once() -> None:
    said: list[str] = []
    nvml = node()
    lost = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage")
    both = sampler(("0", "1", "9", "GPU-nowhere"), nvml, said.append)
    assert list(by_device(both)) == ["node", "0", "1"]
    assert said == [
        "NVML does not find GPU 9 (Invalid Argument): there are no figures of it",
        "NVML does not find GPU GPU-nowhere (Not Found): there are no figures of it",
    ]
    nvml.gpus[0].failing = dict.fromkeys(lost, pynvml.NVML_ERROR_GPU_IS_LOST)
    for _ in range(2):
        assert list(by_device(both)) == ["node", "1"]
    assert said[2:] == [f"GPU 0: {function}: GPU is lost" for function in lost]


def test_usage_sampler_with_mixed_gpus_warns_of_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA then numbers them by their speed, NVML by the bus."""
    said: list[str] = []
    nvml = node()
    nvml.gpus[1].name = "NVIDIA A100"
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    by_device(sampler(("0", "2"), nvml, said.append))  # these are equal
    by_device(sampler((GPUS[0], GPUS[1]), nvml, said.append))
    assert said == []
    by_device(sampler(("0", "1"), nvml, said.append))
    assert [line.split(": ")[0] for line in said] == [
        "GPUs differ (NVIDIA A100, NVIDIA H100 80GB HBM3), so that CUDA and NVML may number them differently, and "
        "figures may be another GPU's"
    ]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    by_device(sampler(("0", "1"), nvml, pytest.fail))


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (None, "no figures of GPUs: import of pynvml halted; None in sys.modules; pip install nvidia-ml-py"),
        (
            StandIn(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
            "no figures of GPUs: NVML does not work here (Driver Not Loaded)",
        ),
    ],
)
def test_usage_sampler_without_nvml_samples_processes(nvml: types.ModuleType | None, said: str) -> None:
    reported: list[str] = []
    usage = sampler(("0",), nvml, reported.append, processes=lambda: {"rank 0": os.getpid()})
    for _ in range(2):
        assert list(by_device(usage)) == ["node", "rank 0"]
    assert reported == [said]


def test_usage_sampler_without_driver_reports_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", load)
    reported: list[str] = []
    assert list(by_device(sampler(("0",), pynvml, reported.append))) == ["node"]
    assert reported == ["no figures of GPUs: NVML does not work here (NVML Shared Library Not Found)"]


def test_usage_sampler_reads_torch_memory_after_cuda_init(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def stats(device: int) -> dict[str, int]:
        asked.append(device)
        return {"allocated_bytes.all.current": 5, "reserved_bytes.all.current": 6}

    def opened(*_: Any) -> None:
        pytest.fail("CUDA was opened")

    nvml = node()
    own = sampler(("3", "1"), nvml, own_device="1")
    monkeypatch.setattr(torch.cuda, "_lazy_init", opened)
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    reported = by_device(own)["1"]
    assert (reported.allocated_bytes, reported.reserved_bytes, asked) == (None, None, [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    reported = by_device(own)
    assert (reported["1"].allocated_bytes, reported["1"].reserved_bytes) == (5, 6)
    assert reported["3"].allocated_bytes is None
    assert asked == [1]  # its place among the job's devices


# -- processes --------------------------------------------------------------------------------------------------------

BUSY = "import sys, time\nprint('up', flush=True)\nwhile True: pass"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""


@pytest.fixture
def tree() -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that idles over one that is busy, and that one's pid."""
    line = [sys.executable, "-c", PARENT, BUSY]
    parent = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        yield parent, child
    finally:
        parent.communicate()


def until_busy(trees: Processes, pids: dict[str, int], name: str) -> float:
    """A reading in which `name` has used its processor."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if busy := trees.read(pids)[name].busy:
            return busy
    raise TimeoutError(name)


def test_processes_count_children_with_parent(tree: tuple[subprocess.Popen, int]) -> None:
    parent, _ = tree
    trees = Processes()
    first = trees.read({"engine 0": parent.pid})["engine 0"]
    assert first.busy is None
    assert first.memory_bytes > 2**20
    assert 0 < until_busy(trees, {"engine 0": parent.pid}, "engine 0") < 1.5


def test_processes_count_engine_apart_from_rank(tree: tuple[subprocess.Popen, int]) -> None:
    parent, child = tree
    trees, pids = Processes(), {"rank 0": parent.pid, "engine 0": child}
    assert trees.read(pids)["rank 0"].memory_bytes < trees.read({"rank 0": parent.pid})["rank 0"].memory_bytes
    trees = Processes()
    trees.read(pids)
    assert until_busy(trees, pids, "engine 0") > 0
    assert trees.read(pids)["rank 0"].busy is not None
    assert (trees.read(pids)["rank 0"].busy or 0) < 0.05  # it only waits


def test_processes_forget_ended_and_replaced_pids(tree: tuple[subprocess.Popen, int]) -> None:
    parent, child = tree
    trees = Processes()
    assert trees.read({"engine 0": child}).keys() == {"engine 0"}
    came_back = trees.read({"engine 0": parent.pid})["engine 0"]
    assert came_back.busy is None  # another process under that name: nothing to compare with
    parent.communicate()
    assert trees.read({"engine 0": parent.pid, "rank 0": os.getpid()}).keys() == {"rank 0"}


# -- the thread -------------------------------------------------------------------------------------------------------


def test_usage_thread_puts_records_until_close() -> None:
    records: queue.Queue[Usage] = queue.Queue()
    pids = {"rank 0": os.getpid()}
    usage = UsageSampler(attempt=0, devices=(), processes=lambda: pids, put=records.put, interval_s=0.01)
    seen = [records.get(timeout=60) for _ in range(6)]
    assert [record.device for record in seen] == ["node", "rank 0"] * 3
    assert seen[0].busy is None
    assert all(record.busy is not None for record in seen[2:])
    assert seen[0].memory_total_bytes is not None
    assert seen[0].memory_total_bytes > (seen[0].memory_bytes or 0) > (seen[1].memory_bytes or 0) > 0
    usage.close(60)
    usage.close()
    assert usage._thread is not None
    assert not usage._thread.is_alive()


def test_usage_thread_after_put_failure_reports_once_and_continues() -> None:
    said: list[str] = []
    records: queue.Queue[Usage] = queue.Queue()
    fails = True

    def put(record: Usage) -> None:
        records.put(record)
        if fails:
            raise OSError(28, "No space left on device")

    usage = UsageSampler(attempt=0, devices=(), processes=dict, put=put, interval_s=0.01, say=said.append)
    for _ in range(3):
        records.get(timeout=60)
    fails = False
    for _ in range(3):
        records.get(timeout=60)
    usage.close(60)
    assert said == ["WARNING: no figures of what devices use: OSError: [Errno 28] No space left on device"]


def test_usage_thread_close_during_hang_returns() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def put(record: Usage) -> None:
        hangs.set()
        goes_on.wait()

    usage = UsageSampler(attempt=0, devices=(), processes=dict, put=put, interval_s=0.01)
    assert hangs.wait(60)
    usage.close(0.01)
    assert usage._thread is not None
    assert usage._thread.is_alive()
    assert usage._thread.daemon
    goes_on.set()
    usage.close(60)
    assert not usage._thread.is_alive()


def test_usage_sampler_without_interval_starts_no_thread() -> None:
    usage = UsageSampler(attempt=0, devices=(), processes=dict, put=lambda record: None, interval_s=0)
    assert usage._thread is None
    usage.close()
