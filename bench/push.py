"""How long the weights take from ZeRO-3's shards to the engine: `python -m bench.push`.

Compared, in turns, on the same two ranks and the same engine: our push, and one parameter at a time as TRL does it.
The second is TRL's own `VLLMGeneration._iter_named_params`, each parameter cast, copied into the packed buffer and
loaded by the engine before the next one is gathered.

Beside them stand the parts that no push can do without, each measured alone in the same turns, on the same bytes:

- `exchange`: shards that are cast already travel to the rank that sends, and to no other: what our push uses over gloo.
- `all-gather`: torch's all-gather of the same bytes, which leaves the model on every rank: what it uses over NCCL. The
  whole push is timed the other way too (`own push by ...`), and what each way brings to each rank is counted.
- `pack`: one copy of the float32 shards into the packed buffer, with the cast.
- `load`: vLLM loads the same number of bytes from packed buffers that are full already.

A bound follows: a push cannot be faster than the slower of exchange and load, which may overlap; and where they share
cores, not faster than the processor time of exchange, pack and load over the number of cores. The larger of the two is
the bound. The engine's processor time is that of its workers alone: vLLM's core process spins while it waits for them
(0.31), which is no work. The bound is given twice: with the all-gather, for which there is a goal, and with the
exchange, the stricter one.

Memory is how much a rank grows in its first push at its highest, packed buffers included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.report import Figure, Ratio, Report, argument_parser, finish, ratio

JOB_S = 420
SHAPES = {  # of a Qwen2 with a tied head; the full one has 0.373 B parameters
    "full": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 27, "vocab_size": 32768},
    "short": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 4096},
}
FASTER_THAN_TRL, OF_THE_BOUND = 1.5, 0.9


def run_ranks(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the ranks, wait for them, and return what each measured.

    Raises:
        RuntimeError: they failed, or took longer than `JOB_S`; with the end of their output.
    """
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    ranks = 2 if gpus == 0 else max(1, min(2, gpus - 1))
    settings = {
        "folder": str(folder),
        "device": args.device,
        "backend": "nccl" if gpus > ranks else "shm",
        "gpus": gpus,
        "shape": SHAPES["short" if args.short else "full"],
        "repetitions": args.repetitions,
        "bucket_mb": args.bucket_mb,
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if args.device == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    log = folder / "ranks.log"
    with log.open("wb") as sink:
        job = subprocess.Popen(
            [*launcher, "-m", "bench.push_ranks", str(path)], stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code = job.wait(JOB_S)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun ends its ranks, and they their engine
            job.wait(60)
            code = None
    if code != 0:
        how = f"still ran after {JOB_S} s" if code is None else f"ended with exit code {code}"
        raise RuntimeError(f"the ranks {how}:\n{log.read_text(errors='replace')[-6000:]}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def figures_of(ranks: list[dict[str, Any]]) -> dict[str, Figure]:
    """Seconds as the sending rank saw them; processor seconds summed over ranks and the engine's workers."""
    figures = {name: Figure(name=name, unit="s", values=tuple(s)) for name, s in ranks[0]["seconds"].items()}
    for name in ("exchange", "all-gather", "pack", "load"):
        summed = tuple(sum(turn) for turn in zip(*(rank["cpu_seconds"][name] for rank in ranks), strict=True))
        figures[f"{name}, processor time"] = Figure(name=f"{name}, processor time", unit="s", values=summed)
    return figures


def bound_of(figures: dict[str, Figure], gather: str, cores: int) -> Figure:
    """The larger of: the slower phase, and all processor time over the cores; for each repetition."""
    parts = (gather, "load", *(f"{name}, processor time" for name in (gather, "pack", "load")))
    values = [
        max(gather_s, load_s, sum(processor) / cores)
        for gather_s, load_s, *processor in zip(*(figures[part].values for part in parts), strict=True)
    ]
    return Figure(name=f"bound with {gather}", unit="s", values=tuple(values))


def report_of(ranks: list[dict[str, Any]], args: argparse.Namespace) -> Report:
    figures = figures_of(ranks)
    cores = len(os.sched_getaffinity(0))
    own, trl = figures["own push"], figures["one parameter at a time"]
    own_gather = "all-gather" if args.device == "cuda" else "exchange"
    bounds = [bound_of(figures, gather, cores) for gather in ("all-gather", "exchange")]
    slower = Figure(
        name="slower phase",
        unit="s",
        values=tuple(max(pair) for pair in zip(figures[own_gather].values, figures["load"].values, strict=True)),
    )
    ratios: list[Ratio] = [
        ratio("one parameter at a time / own push", trl, own, FASTER_THAN_TRL),
        ratio(f"{bounds[0].name} / own push", bounds[0], own, OF_THE_BOUND),
        ratio(f"{bounds[1].name} / own push", bounds[1], own),
        ratio("own push / slower phase", own, slower),
    ]
    memory = tuple(
        Figure(name=f"memory of {name}, rank {rank}", unit="MiB", values=(grown / 2**20,))
        for rank, found in enumerate(ranks)
        for name, grown in found["grown_bytes"].items()
    )
    received = tuple(
        Figure(name=f"received by {way}, rank {rank}", unit="MiB", values=(num_bytes / 2**20,))
        for rank, found in enumerate(ranks)
        for way, num_bytes in found["received_bytes"].items()
    )
    return Report(
        benchmark="push",
        settings={name: ranks[0][name] for name in ("parameters", "wire_mb", "buckets", "bucket_mb", "backend")}
        | {"ranks": len(ranks)},
        ratios=tuple(ratios),
        figures=(*figures.values(), *bounds, *memory, *received),
        notes=(
            f"float32 shards over {len(ranks)} ranks with ZeRO-3, a bfloat16 engine, {cores} cores",
            f"a bucket has {ranks[0]['bucket_mb']} MiB, and there are {ranks[0]['num_buffers']} packed buffers",
        ),
    )


def main() -> None:
    parser = argument_parser("From ZeRO-3's shards to the engine: our push, TRL's way, and what bounds both.")
    parser.add_argument("--bucket-mb", type=int, default=512, help="vllm_sync_bucket_mb")
    args = parser.parse_args()
    if args.short:
        args.repetitions = min(args.repetitions, 2)
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as folder:
        finish(report_of(run_ranks(args, Path(folder)), args), args)


if __name__ == "__main__":
    main()
