"""The kind of a failure: ours say it themselves, and other libraries' errors are known as they raise them."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import AutoConfig

from grpo.engine.client import EngineError
from grpo.faults import device_memory
from grpo.faults.device_memory import DeviceMemory
from grpo.faults.failure import FailureKind, FailureRecord, GenerationDropped, JobFailed
from grpo.faults.kinds import FOREIGN, ends_job, is_users, kind_of, may_be_an_echo, note_steps
from grpo.faults.liveness import NodePlace
from grpo.faults.sentinel_start import SentinelError
from grpo.faults.watch import FailureWatch


def raised(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:  # noqa: BLE001  whatever the library raises is what is classified
        return error
    raise AssertionError("nothing was raised")


def of_the_hub(status: int) -> HfHubHTTPError:
    import httpx

    request = httpx.Request("GET", "https://hub/x")
    return HfHubHTTPError("the hub's answer", response=httpx.Response(status, request=request))


def misspelt_model() -> BaseException:
    return raised(lambda: AutoConfig.from_pretrained("./modle"))


def model_not_in_the_cache() -> BaseException:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return raised(lambda: AutoConfig.from_pretrained("nobody/no-such-model"))


def missing_column() -> BaseException:
    return raised(lambda: Dataset.from_dict({"question": ["1+1?"]})[0]["prompt"])


def silent_store() -> BaseException:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return raised(lambda: store.wait(["never"], timedelta(milliseconds=10)))


def no_store() -> BaseException:
    return raised(
        lambda: dist.TCPStore(
            "127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=300), wait_for_workers=False
        )
    )


def no_hub() -> BaseException:
    import httpx

    return raised(lambda: httpx.get("http://127.0.0.1:1/"))


def record(kind: FailureKind) -> JobFailed:
    return JobFailed(FailureRecord(node=0, rank=1, host="a", phase="start", cause="why", kind=kind))


def followed(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


# -- vLLM's, by its own code -------------------------------------------------------------------------------------------


def vllm_finds_too_little_free() -> BaseException:
    from vllm.v1.worker.utils import request_memory

    snapshot = SimpleNamespace(total_memory=80 << 30, free_memory=10 << 30, device_="cuda:0")
    return raised(lambda: request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.9)))


def vllm_has_no_space_for_blocks(available: int) -> BaseException:
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    return raised(lambda: _check_enough_kv_cache_memory(available, lambda: 9 << 30, 4096, lambda memory: 128))


def vllm_misses_a_worker() -> BaseException:
    """Behind which stands the worker's own error, in its log."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    handle = SimpleNamespace(ready_pipe=ours, proc=SimpleNamespace(name="worker"), rank=0)
    return raised(lambda: WorkerProc.wait_for_ready([handle]))


def vllm_engine_is_dead() -> BaseException:
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError()


# -- DeepSpeed's and torch's -------------------------------------------------------------------------------------------


def deepspeed_refuses() -> BaseException:
    from deepspeed.runtime.config import DeepSpeedConfig

    return raised(lambda: DeepSpeedConfig({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}))


def killed_data_worker() -> BaseException:
    class Dies(torch.utils.data.IterableDataset):
        def __iter__(self) -> object:
            os.kill(os.getpid(), signal.SIGKILL)
            return iter([1])

    before = signal.getsignal(signal.SIGCHLD)
    try:
        return raised(lambda: list(torch.utils.data.DataLoader(Dies(), num_workers=1, multiprocessing_context="fork")))
    finally:
        signal.signal(signal.SIGCHLD, before)


PEER = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from grpo.faults.kinds import may_be_an_echo
from grpo.faults.kinds import kind_of
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=int(sys.argv[3])))
dist.barrier()
if rank:
    import time
    time.sleep(0 if sys.argv[4] == "ends" else 60)
    import os
    os._exit(0)
try:
    dist.all_reduce(torch.ones(1))
except Exception as error:
    print(kind_of(error), may_be_an_echo(error), type(error).__name__, str(error).splitlines()[0])
"""


@pytest.mark.parametrize(("timeout_s", "peer"), [(60, "ends"), (2, "is silent")])
def test_kind_of_lost_gloo_peer_is_machine_and_echo(timeout_s: int, peer: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PEER]
    reported = [str(tmp_path / "store"), str(timeout_s), peer.split()[0]]
    with subprocess.Popen([*words, "1", *reported]) as other:
        try:
            done = subprocess.run([*words, "0", *reported], capture_output=True, text=True, timeout=120, check=False)
        finally:
            other.kill()
    assert done.stdout.startswith("machine True "), done


USER = {
    "a value": ValueError("num_generations is 1"),
    "a type": TypeError("reward() got an unexpected keyword argument 'answer'"),
    "a module": ModuleNotFoundError("No module named 'rewards'"),
    "a name": NameError("name 'np' is not defined"),
    "a line": SyntaxError("invalid syntax"),
    "the user's division": ZeroDivisionError("division by zero"),
    "a missing column": missing_column,
    "a misspelt model": misspelt_model,
    "a model that is not in the cache": model_not_in_the_cache,
    "offline": OfflineModeIsEnabled("offline"),
    "a model that the hub does not have": of_the_hub(404),
    "a gated model": of_the_hub(401),
    "no file": FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "data.jsonl"),
    "no rights": PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/out"),
    "a folder": lambda: raised(lambda: Path(os.sep).read_text()),
    "a read-only disk": OSError(errno.EROFS, os.strerror(errno.EROFS)),
    "a runtime error": RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    "words of ours": RuntimeError("the peer review column died: not in the data"),
    "shapes": lambda: raised(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)),
    "DeepSpeed's settings": deepspeed_refuses,
    "argparse": SystemExit(2),
    "a script that gives up": SystemExit("give a model"),
    "an engine argument": EngineError("it ended", log="; its log: CUDA error", kind=FailureKind.USER),
    "another rank's": record(FailureKind.USER),
}
MEMORY = {
    "CUDA's memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "CUDA's memory, by the runtime": RuntimeError("CUDA error: out of memory"),
    "cuBLAS's memory": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "what memory led to": followed(RuntimeError("the model cannot be loaded"), torch.OutOfMemoryError("of 80 GiB")),
    "vLLM's share": vllm_finds_too_little_free,
    "vLLM's blocks": lambda: vllm_has_no_space_for_blocks(0),
    "vLLM's longest sequence": lambda: vllm_has_no_space_for_blocks(1 << 30),
}
MACHINE = {
    "a deadline": TimeoutError("ranks [3] did not come within 300 s"),
    "a lost peer": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "a full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "a broken disk": OSError(errno.EIO, os.strerror(errno.EIO)),
    "a stale file handle": OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    "no memory of the host": MemoryError(),
    "a lost store": dist.DistNetworkError("the store is gone"),
    "a store that is not there": no_store,
    "a store that is silent": silent_store,
    "NCCL": dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2271, unhandled system error"),
    "CUDA": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "a device": torch.AcceleratorError("an illegal memory access was encountered"),
    "cuBLAS": RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    "a killed data worker": killed_data_worker,
    "a hub that is not there": no_hub,
    "the hub's trouble": of_the_hub(503),
    "the hub's patience": of_the_hub(429),
    "the hub's trouble, as transformers tells it": followed(OSError("We couldn't connect"), of_the_hub(503)),
    "a sentinel": SentinelError("the sentinel of node 1 did not start: silent for 60 s"),
    "a script that is done": SystemExit(0),
}
ENGINE = {
    "a killed engine": EngineError("engine 0 of node 0 was killed by signal 9"),
    "a driver that holds one": EngineError("engine 0 (pid 7) does not end 30 s after SIGKILL: a driver may hold it"),
    "another process of vLLM's": vllm_misses_a_worker,
    "vLLM's engine": vllm_engine_is_dead,
}
STOP = {"an engine after a stop": GenerationDropped("SIGTERM"), "a person": KeyboardInterrupt()}
ALL = {
    FailureKind.USER: USER,
    FailureKind.MEMORY: MEMORY,
    FailureKind.MACHINE: MACHINE,
    FailureKind.NODE_LOST: {"a silent node": JobFailed(NodePlace(node=1, rank=8, host="b", pid=7).is_silent(20))},
    FailureKind.ENGINE: ENGINE,
    FailureKind.STOP: STOP,
}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in ALL.items() for case in cases])
def test_kind_of_error_matches_table(kind: FailureKind, case: str) -> None:
    made = ALL[kind][case]
    error = made() if callable(made) else made
    assert isinstance(error, BaseException)
    assert kind_of(error) is kind, repr(error)


def test_foreign_table_has_no_idle_row() -> None:
    """Each is the first that fits some error above."""
    firsts = set()
    for made in [made for cases in ALL.values() for made in cases.values()]:
        error = made() if callable(made) else made
        names = [f"{each.__module__}.{each.__name__}" for each in type(error).__mro__]
        fits = [
            number
            for number, (of_class, of_text, _) in enumerate(FOREIGN)
            if any(map(of_class.fullmatch, names)) and of_text.search(str(error))
        ]
        firsts |= set(fits[:1])
    assert firsts == set(range(len(FOREIGN)))


def test_ends_job_before_first_step_for_user_and_memory_only() -> None:
    ends = {kind: ends_job(record(kind)) for kind in FailureKind}
    assert [kind for kind in ends if ends[kind]] == [FailureKind.USER, FailureKind.MEMORY]
    note_steps(3)
    assert not any(ends_job(record(kind)) for kind in FailureKind)


def test_echo_of_own_errors_is_false() -> None:
    assert not may_be_an_echo(SentinelError("the connection to the peer timed out"))
    assert may_be_an_echo(followed(SentinelError("no word"), dist.DistStoreError("wait timeout")))


def test_make_record_sets_kind_of_failure() -> None:
    watch = FailureWatch(None, node=0, rank=0, host="a")
    assert watch.make_record(ValueError("a value"), phase="generate").kind is FailureKind.USER
    assert watch.make_record("out of memory, timed out, a typo").kind is FailureKind.MACHINE, "what nobody has named"
    assert watch.make_record("why", kind=FailureKind.ENGINE).kind is FailureKind.ENGINE


def test_is_users_with_response_without_status_is_true() -> None:
    error = ValueError("a judge's answer")
    error.response = SimpleNamespace()  # type: ignore[attr-defined]
    assert is_users(error)


# -- memory ------------------------------------------------------------------------------------------------------------

GIB = 2**30
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 80.00 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 39.00 GiB memory in use."
)


def held(own: float, others: float, free: float) -> DeviceMemory:
    total = int((own + others + free) * GIB)
    return DeviceMemory(total=total, free=int(free * GIB), own=int(own * GIB), others=int(others * GIB))


@pytest.mark.parametrize(
    ("memory", "kind"),
    [
        (held(39, 40, 1), FailureKind.MACHINE),  # without the others it would fit
        (held(79, 0, 1), FailureKind.MEMORY),
        (held(78.9, 0.1, 1), FailureKind.MEMORY),  # a tool that only looks
        (None, FailureKind.MACHINE),  # as torch says
    ],
)
def test_kind_of_cuda_oom_depends_on_memory_of_others(
    memory: DeviceMemory | None, kind: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def read(device: int) -> DeviceMemory | None:
        asked.append(device)
        return memory

    monkeypatch.setattr(device_memory, "read_memory", read)
    error = torch.OutOfMemoryError(FULL)
    watch = FailureWatch(None, node=0, rank=0, host="a")
    found = watch.make_record(error, phase="train")
    assert (found.kind, found.phase, kind_of(error), asked) == (kind, "train", kind, [1]), "the driver is asked once"
    figures = "device 1, in GiB: asked for 2.00, free 1.00 of 80.00, held by this process "
    assert figures in found.cause
    assert ("[GRPO-631]" in found.cause) == (kind is FailureKind.MEMORY)


def test_kind_of_vllm_oom_depends_on_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for 72 of 80 GiB, and 10 are free."""
    monkeypatch.setattr(device_memory, "read_memory", lambda device: held(0, 70, 10))
    assert kind_of(vllm_finds_too_little_free()) is FailureKind.MACHINE
    monkeypatch.setattr(device_memory, "read_memory", lambda device: held(65, 5, 10))
    assert kind_of(vllm_finds_too_little_free()) is FailureKind.MEMORY
