"""Whose fault a failure is: what the next start would meet again, and what may heal."""

import errno
import os
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
from grpo.faults.failure import FailureRecord, GenerationDropped, JobFailed
from grpo.faults.mistakes import is_mistake
from grpo.faults.watch import FailureWatch

LOG = "; the last lines of /scratch/nccl-timeout/engine.log:\n"


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


def failed(*, can_heal: bool) -> JobFailed:
    return JobFailed(FailureRecord(node=0, rank=1, host="a", phase="start", cause="why", can_heal=can_heal))


def followed(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


MISTAKES = {
    "a value": ValueError("num_generations is 1"),
    "a type": TypeError("reward() got an unexpected keyword argument 'answer'"),
    "a module": ModuleNotFoundError("No module named 'rewards'"),
    "a name": NameError("name 'np' is not defined"),
    "a line": SyntaxError("invalid syntax"),
    "the user's division": ZeroDivisionError("division by zero"),
    "a missing column": missing_column(),
    "a misspelt model": misspelt_model(),
    "a model that is not in the cache": model_not_in_the_cache(),
    "offline": OfflineModeIsEnabled("offline"),
    "a model that the hub does not have": of_the_hub(404),
    "a gated model": of_the_hub(401),
    "no file": FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "data.jsonl"),
    "no rights": PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/out"),
    "a folder": raised(lambda: Path(os.sep).read_text()),
    "a read-only disk": OSError(errno.EROFS, os.strerror(errno.EROFS)),
    "a runtime error": RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    "shapes": raised(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)),
    "argparse": SystemExit(2),
    "a script that gives up": SystemExit("give a model"),
    "an engine argument": EngineError(
        f"engine 0 of node 0 ended with exit code 1: ValidationError: max_model_len{LOG}ValueError: max_model_len 9"
    ),
    "another rank's": failed(can_heal=False),
}
MACHINE = {
    "a deadline": TimeoutError("ranks [3] did not come within 300 s"),
    "a lost peer": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "a full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "a broken disk": OSError(errno.EIO, os.strerror(errno.EIO)),
    "a stale file handle": OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    "no memory": MemoryError(),
    "a lost store": dist.DistNetworkError("the store is gone"),
    "a store that is not there": no_store(),
    "a store that is silent": silent_store(),
    "NCCL": dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2271, unhandled system error"),
    "CUDA": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "CUDA's memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cuBLAS": RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    "gloo": RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:7"),
    "a killed worker": RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
    "what CUDA led to": followed(RuntimeError("the model cannot be loaded"), torch.OutOfMemoryError("of 80 GiB")),
    "a killed engine": EngineError(f"engine 0 of node 0 was killed by signal 9{LOG}INFO ready"),
    "an engine's start": EngineError(f"engine 0 of node 0 is not ready after 600 s (vllm_start_timeout){LOG}"),
    "an engine's silence": EngineError(f"engine 0 of node 0 did not answer update_weights within 60 s{LOG}"),
    "an engine's GPU": EngineError(f"engine 0 ended with exit code 1{LOG}RuntimeError: CUDA error: no device"),
    "the hub's trouble": of_the_hub(503),
    "the hub's patience": of_the_hub(429),
    "the hub's trouble, as transformers tells it": followed(OSError("We couldn't connect"), of_the_hub(503)),
    "another rank's": failed(can_heal=True),
    "an engine after a stop": GenerationDropped("SIGTERM"),
    "a person": KeyboardInterrupt(),
    "a script that is done": SystemExit(0),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_do_not_heal_before_the_first_step(case: str) -> None:
    assert is_mistake(MISTAKES[case], before_first_step=True), repr(MISTAKES[case])


@pytest.mark.parametrize("case", MACHINE)
def test_what_the_machine_caused_may_heal(case: str) -> None:
    assert not is_mistake(MACHINE[case], before_first_step=True), repr(MACHINE[case])


@pytest.mark.parametrize("case", [*MISTAKES, *MACHINE])
def test_behind_the_first_step_only_what_is_on_record_does_not_heal(case: str) -> None:
    error = {**MACHINE, **MISTAKES}[case]
    assert is_mistake(error, before_first_step=False) == (error is MISTAKES["another rank's"])


def test_the_watchs_record_says_so() -> None:
    watch = FailureWatch(None, node=0, rank=0, host="a")
    assert not watch.make_record(ValueError("a value"), phase="generate").can_heal
    assert watch.make_record("the process of rank 1 (pid 7) died without a word: killed?").can_heal


def test_an_answer_without_a_status_is_none() -> None:
    error = ValueError("a judge's answer")
    error.response = SimpleNamespace()  # type: ignore[attr-defined]
    assert is_mistake(error, before_first_step=True)
