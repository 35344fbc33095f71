"""Whether a backend carries the number formats that a job exchanges: by the values that arrive.

Gradients and weights travel in bfloat16, float16 or float32, and a backend that lacks one of them may say so in the
middle of the first step, or add it up wrongly.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.doctor.records import Finding, Status

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


def find_broken(
    group: "dist.ProcessGroup", rank: int, size: int, device: torch.device, dtypes: Sequence[str] = DTYPES
) -> list[Broken]:
    """What this rank saw of each operation in each format. Collective over `group`, of `size` ranks; this is `rank`.

    Sums are small whole numbers to which two ranks add: exact in every format, whatever the order.
    """
    broken = []
    for name in dtypes:
        for operation in OPERATIONS:
            try:
                arrived, expected = _exchange(operation, group, rank, size, device, getattr(torch, name))
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
    operation: str, group: "dist.ProcessGroup", rank: int, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what arrived, what should), float32 on the CPU."""
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
    found: dict[int, list[Broken]] = {}
    errors: list[str] = []

    def be_rank(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=_LOCAL_S))
        except RuntimeError as error:  # gloo finds no address to listen at, say
            errors.append(str(error).partition("\n")[0])
            return
        found[rank] = find_broken(group, rank, 2, torch.device("cpu"), dtypes)

    threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LOCAL_S)
    if errors:
        raise ChildProcessError(f"a gloo rank of this machine could not start: {errors[0]}")
    if len(found) < 2:
        raise TimeoutError(f"two gloo ranks of this machine did not end within {_LOCAL_S:.0f} s")
    return merge([found[0], found[1]])


def try_processes(
    backend: str, dtypes: Sequence[str] = DTYPES, *, on_gpus: bool = True, timeout_s: float = _PROCESSES_S
) -> list[Broken]:
    """Two ranks in processes of their own, on the first two GPUs: NCCL refuses two on one.

    Raises:
        TimeoutError: they did not end in time.
        ChildProcessError: one of them ended otherwise than by itself; with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-doctor-") as folder, ExitStack() as ends:
        command = [
            sys.executable,
            "-m",
            __name__,
            backend,
            folder,
            str(timeout_s),
            "cuda" if on_gpus else "cpu",
            *dtypes,
        ]
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(2)]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("wb") as sink:
                ranks.append(subprocess.Popen([*command, str(rank)], stdout=sink, stderr=subprocess.STDOUT))
            ends.callback(ranks[-1].wait)
            ends.callback(ranks[-1].kill)
        try:
            codes = [rank.wait(timeout_s) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"two {backend} ranks of this machine did not end within {timeout_s:.0f} s") from None
        for code, log in zip(codes, logs, strict=True):
            if code:
                lines = log.read_text(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "no word")
                raise ChildProcessError(f"a {backend} rank of this machine ended with {code}: {last.strip()}")
        return merge([loads((Path(folder) / f"{rank}.found").read_text()) for rank in range(2)])


def main(argv: Sequence[str]) -> None:
    """One of the two processes: `BACKEND FOLDER SECONDS cuda|cpu DTYPES... RANK`."""
    backend, folder, timeout_s, kind, *dtypes, number = argv
    rank = int(number)
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=float(timeout_s)))
    broken = find_broken(dist.group.WORLD, rank, 2, device, dtypes)
    (Path(folder) / f"{rank}.found").write_text(dumps(broken))
    dist.destroy_process_group()


# -- what it means ------------------------------------------------------------------------------------------------


def dumps(broken: Sequence[Broken]) -> str:
    return json.dumps([asdict(one) for one in broken])


def loads(text: str) -> list[Broken]:
    return [Broken(**one) for one in json.loads(text)]


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
        is_certain = job is not None or dtype == "float32"  # which every job exchanges
        findings.append(
            Finding(
                check="number formats",
                status=Status.FAIL if is_certain else Status.WARN,
                message=f"{backend} does not carry {dtype} ({where}): "
                + "; ".join(f"{one.operation}: {one.why}" for one in found),
                fix=("" if is_certain else f"if the job trains in {dtype}: ") + _fix(dtype, found, backend),
            )
        )
    good = [dtype for dtype in tried if dtype not in {one.dtype for one in broken}]
    if not findings:
        message = f"{backend} carries {', '.join(good)} ({', '.join(OPERATIONS)}; {where})"
        findings.append(Finding(check="number formats", status=Status.PASS, message=message))
    return findings


def _fix(dtype: str, broken: Sequence[Broken], backend: str) -> str:
    setting = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    ways = [f"train with ddp_backend: {'gloo' if backend == 'nccl' else 'nccl'}", "install another build of torch"]
    if setting is not None:
        ways.insert(0, f"train in another format ({setting}: false)")
        if all(one.operation in ("all-reduce", "reduce-scatter") for one in broken):
            ways.insert(0, "have gradients reduced in float32 (communication_data_type: fp32 in DeepSpeed's file)")
    return ", or ".join(ways)


if __name__ == "__main__":
    main(sys.argv[1:])
