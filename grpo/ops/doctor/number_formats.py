"""Whether a backend carries the number formats that a job exchanges: by the values that arrive.

Gradients and weights travel in bfloat16, float16 or float32, and a backend that lacks one of them may say so in the
middle of the first step, or add it up wrongly.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import TimeoutError as TimeoutExpired
from multiprocessing import get_context
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

import torch
import torch.distributed as dist

from grpo.ops.doctor.records import Finding

OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")
DTYPES = ("float32", "bfloat16", "float16")
_PER_RANK = 5  # elements; odd, and no multiple of any vector width
_LOCAL_S = 10.0  # for two gloo ranks in this process; they need 0.1 s
_PROCESSES_S = 18.0  # for two ranks of their own: imports, CUDA, NCCL


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """One operation that did not work in one format."""

    operation: str
    dtype: str
    why: str
    """The backend's words, or what arrived in place of what."""


def find_broken(group: "dist.ProcessGroup", device: torch.device, dtypes: Sequence[str]) -> list[Broken]:
    """What this rank saw of each operation in each format. Collective over `group`.

    Sums are small whole numbers to which two ranks add: exact in every format, whatever the order.
    """
    broken = []
    for name in dtypes:
        for operation in OPERATIONS:
            try:
                arrived, expected = _exchange(operation, group, device, getattr(torch, name))
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                why = str(error).strip().partition("\n")[0]
            else:
                if torch.equal(arrived, expected):
                    continue
                at = int((arrived != expected).nonzero()[0])
                why = f"element {at} is {arrived[at]:g} and should be {expected[at]:g}"
            broken.append(Broken(operation=operation, dtype=name, why=why))
    return broken


def _exchange(
    operation: str, group: "dist.ProcessGroup", device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what arrived, what should), float32 on the CPU."""
    rank, size = group.rank(), group.size()
    index = torch.arange(_PER_RANK * size)
    total = 9 + index % 5
    own = torch.where(index % size == rank, 1 + index % 5, 0) + torch.where((index + 1) % size == rank, 8, 0)
    mine = slice(rank * _PER_RANK, (rank + 1) * _PER_RANK)
    match operation:
        case "all-reduce":
            result = own.to(device, dtype)
            group.allreduce([result]).wait()
            expected = total
        case "reduce-scatter":
            result = torch.zeros(_PER_RANK, device=device, dtype=dtype)
            group._reduce_scatter_base(result, own.to(device, dtype)).wait()
            expected = total[mine]
        case "all-gather":
            result = torch.zeros(len(index), device=device, dtype=dtype)
            group._allgather_base(result, total[mine].to(device, dtype)).wait()
            expected = total
        case _:
            options = dist.BroadcastOptions()
            options.rootRank = size - 1
            result = (total if rank == size - 1 else torch.zeros_like(total)).to(device, dtype)
            group.broadcast([result], options).wait()
            expected = total
    return result.float().cpu(), expected.float()


# -- two ranks on this machine ------------------------------------------------------------------------------------


def try_gloo(dtypes: Sequence[str] = DTYPES) -> list[Broken]:
    """Two gloo ranks, in threads of this process. Raises as `try_processes` does."""
    store = dist.HashStore()
    with ThreadPool(2) as pool:
        return _of_both(pool, _be_thread, [(rank, dtypes, store) for rank in range(2)], "gloo", _LOCAL_S)


def _be_thread(rank: int, dtypes: Sequence[str], store: dist.Store) -> list[Broken]:
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=_LOCAL_S))
    return find_broken(group, torch.device("cpu"), dtypes)


def try_processes(
    backend: str, dtypes: Sequence[str] = DTYPES, *, on_gpus: bool = True, timeout_s: float = _PROCESSES_S
) -> list[Broken]:
    """Two ranks in processes of their own, on the first two GPUs: NCCL refuses two on one.

    Raises:
        TimeoutError: they did not end in time, or died.
        ChildProcessError: one of them could not start; with its error.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-doctor-") as folder, get_context("spawn").Pool(2) as pool:
        options = [(rank, dtypes, f"{folder}/store", backend, "cuda" if on_gpus else "cpu") for rank in range(2)]
        return _of_both(pool, _be_process, options, backend, timeout_s)


def _be_process(rank: int, dtypes: Sequence[str], store: str, backend: str, kind: str) -> list[Broken]:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=_PROCESSES_S)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
    broken = find_broken(dist.group.WORLD, device, dtypes)
    dist.destroy_process_group()
    return broken


def _of_both(
    pool: Pool, be_rank: Callable[..., list[Broken]], options: Sequence[tuple[Any, ...]], backend: str, timeout_s: float
) -> list[Broken]:
    try:
        return merge(pool.starmap_async(be_rank, options, chunksize=1).get(timeout_s))
    except TimeoutExpired:
        raise TimeoutError(f"two {backend} ranks of this machine did not end within {timeout_s:.0f} s") from None
    except (RuntimeError, ValueError) as error:  # gloo finds no address to listen at, say
        cause = str(error).partition("\n")[0]
        raise ChildProcessError(f"a {backend} rank of this machine could not start: {cause}") from error


# -- what it means ------------------------------------------------------------------------------------------------


def merge(of_ranks: Sequence[Sequence[Broken]]) -> list[Broken]:
    """What any rank saw, once: the words of the first that saw it."""
    merged = {(one.operation, one.dtype): one for broken in reversed(of_ranks) for one in broken}
    order = [(operation, dtype) for dtype in DTYPES for operation in OPERATIONS]
    return [merged[key] for key in order if key in merged]


def judge_formats(broken: Sequence[Broken], *, where: str, backend: str, job: Sequence[str] | None) -> list[Finding]:
    """A finding for each format that does not work, or one for all that do.

    Args:
        where: who tried, `two ranks of this node on CPUs`.
        job: the formats that the job exchanges; None where nobody has said, and all were tried.
    """
    tried = [dtype for dtype in DTYPES if job is None or dtype in job]
    findings = []
    for dtype in tried:
        found = [one for one in broken if one.dtype == dtype]
        if not found:
            continue
        told = "; ".join(f"{one.operation}: {one.why}" for one in found)
        message, fix = f"{backend} does not carry {dtype} ({where}): {told}", _fix(dtype, found, backend)
        if job is not None or dtype == "float32":  # which every job exchanges
            findings.append(Finding.fail("number formats", message, fix))
        else:
            findings.append(Finding.warn("number formats", message, f"if the job trains in {dtype}: {fix}"))
    message = f"{backend} carries {', '.join(tried)} ({', '.join(OPERATIONS)}; {where})"
    return findings or [Finding.passed("number formats", message)]


def _fix(dtype: str, broken: Sequence[Broken], backend: str) -> str:
    setting = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    ways = [f"train with ddp_backend: {'gloo' if backend == 'nccl' else 'nccl'}", "install another build of torch"]
    if setting is not None:
        ways.insert(0, f"train in another format ({setting}: false)")
        if all(one.operation in ("all-reduce", "reduce-scatter") for one in broken):
            ways.insert(0, "have gradients reduced in float32 (communication_data_type: fp32 in DeepSpeed's file)")
    return ", or ".join(ways)
