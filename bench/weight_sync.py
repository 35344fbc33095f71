"""How long the weights take from ZeRO-3's shards to the engine: `python -m bench.weight_sync`.

Compared, in turns, on the same two ranks and the same engine: our weight sync, and what a user of TRL 1.16 has. All of
TRL's ways walk through `VLLMGeneration._iter_named_params`, which gathers one parameter after the other:

- `TRL's packed stream`: server mode. Gathered parameters are packed in chunks; one is loaded while the next one is
  gathered.
- `TRL loads in the process`: colocate mode. Every rank has an engine, whose model loads each parameter; there is no
  other process and no transport. Here it is that model alone, and it leaves out what vLLM does on CPUs with weights
  that are loaded, to pack them for its kernels: our engine does it in every weight sync, and on GPUs there is no such
  thing.
- `one call for each parameter`: `VLLMClient.update_named_param` by itself, each parameter cast, copied into the packed
  buffer and loaded by the engine before the next one is gathered. TRL's trainers do not sync so.

Beside them stand the parts that no weight sync can do without, each measured alone in the same turns, on the same
bytes:

- `exchange`: shards that are cast already travel to the rank that sends, and to no other: what our weight sync uses
over gloo.
- `all-gather`: torch's all-gather of the same bytes, which leaves the model on every rank: what it uses over NCCL. The
  whole weight sync is timed the other way too (`own sync by ...`), and what each way brings to each rank is counted.
- `pack`: one copy of the shards into the packed buffer, with a cast where they are float32.
- `load`: vLLM loads the same number of bytes from packed buffers that are full already.

A bound follows: a weight sync cannot be faster than the slower of exchange and load, which may overlap; and where they
share cores, not faster than the processor time of exchange, pack and load over the number of cores. The larger of the
two is the bound. The engine's processor time is that of its workers alone: vLLM's core process spins while it waits for
them (0.31), which is no work. With the all-gather it would be no bound: it brings the model to ranks that need none of
it.

Then a mixture of experts, on an engine of its own: all experts of a layer as one tensor for each projection, loaded in
one call for each of gate, up and down, and experts one by one, as checkpoints hold them. What differs is calls: three
for each layer, or three for each expert. An expert has 48 KiB, which are copied here in about the time that 9 MiB, a
30B-A3B's expert, should take over NVLink, 0.05 to 0.1 ms: with larger ones a CPU's copies hide the calls.

`own sync, bits checked` is our weight sync with sums of all bits, taken where they are packed, where they arrive and
where vLLM loads them; with LoRA the sums of the frozen base are in it, too. On CPUs it is one of ten syncs, after the
first ten; over NCCL it is every sync. The base is summed where a sync is verified, and there a forward of it, which is
not in these figures, takes ten times as long and more; so the share with LoRA has no goal.

Then LoRA of rank 16 on all linear layers of the dense model, on an engine of its own: adapters alone, as every weight
sync but the first; the base with them; and TRL's server mode, which gathers the whole model, merges, and sends it in
its stream.

Memory is how much a rank grows in its first weight sync at its highest, packed buffers included; with LoRA in a later
one.
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
EXPERTS = {  # of a Qwen3-MoE
    "full": {"num_experts": 128, "num_hidden_layers": 4, "hidden_size": 128, "moe_intermediate_size": 64},
    "short": {"num_experts": 16, "num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32},
}
FASTER_THAN_TRL, OF_THE_BOUND, FASTER_THAN_ONE_BY_ONE = 1.5, 0.9, 2.0
FASTER_THAN_THE_WHOLE, OF_THE_ADAPTER = 10.0, 0.95
CHECKED_EVERY = {"cpu": 10, "cuda": 1}  # weight syncs whose bits are checked: later than the tenth on CPUs
WITHOUT_THE_CHECK = 0.97  # of the time of a sync, the check's share amortised


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
        "experts": EXPERTS["short" if args.short else "full"],
        "repetitions": args.repetitions,
        "bucket_mb": args.bucket_mb,
        "shards": args.shards,
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
            [*launcher, "-m", "bench.weight_sync_job", str(path)],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
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
    seconds = ranks[0]["seconds"] | ranks[0]["experts"]["seconds"] | ranks[0]["lora"]["seconds"]
    figures = {name: Figure(name=name, unit="s", values=tuple(s)) for name, s in seconds.items()}
    for name in ("exchange", "all-gather", "pack", "load"):
        summed = tuple(sum(turn) for turn in zip(*(rank["cpu_seconds"][name] for rank in ranks), strict=True))
        figures[f"{name}, processor time"] = Figure(name=f"{name}, processor time", unit="s", values=summed)
    return figures


def bound_of(figures: dict[str, Figure], cores: int) -> Figure:
    """The larger of: the slower phase, and all processor time over the cores; for each repetition."""
    parts = ("exchange", "load", *(f"{name}, processor time" for name in ("exchange", "pack", "load")))
    values = [
        max(exchange_s, load_s, sum(processor) / cores)
        for exchange_s, load_s, *processor in zip(*(figures[part].values for part in parts), strict=True)
    ]
    return Figure(name="bound", unit="s", values=tuple(values))


def checked_share(figures: dict[str, Figure], sync: str, device: str, goal: float | None = None) -> Ratio:
    """How long a weight sync takes without the check of its bits, over how long with it on the average of many."""
    every = CHECKED_EVERY[device]
    pairs = zip(figures[sync].values, figures[f"{sync}, bits checked"].values, strict=True)
    amortised = tuple(((every - 1) * plain + checked) / every for plain, checked in pairs)
    name = f"{sync} / with its bits checked in one of {every}"
    return ratio(name, figures[sync], Figure(name=name, unit="s", values=amortised), goal)


def report_of(ranks: list[dict[str, Any]], args: argparse.Namespace) -> Report:
    figures = figures_of(ranks)
    cores = len(os.sched_getaffinity(0))
    own = figures["own weight sync"]
    own_gather = "all-gather" if args.device == "cuda" else "exchange"
    bound = bound_of(figures, cores)
    slower = Figure(
        name="slower phase",
        unit="s",
        values=tuple(max(pair) for pair in zip(figures[own_gather].values, figures["load"].values, strict=True)),
    )
    lora = ranks[0]["lora"]
    size, synced = (
        Figure(name=name, unit="MiB", values=(num_bytes / 2**20,))
        for name, num_bytes in (("an adapter", lora["adapter_bytes"]), ("synced", lora["synced_bytes"]))
    )
    ratios: list[Ratio] = [
        ratio("TRL's packed stream / own weight sync", figures["TRL's packed stream"], own, FASTER_THAN_TRL),
        ratio("TRL loads in the process / own weight sync", figures["TRL loads in the process"], own),
        ratio("one call for each parameter / own weight sync", figures["one call for each parameter"], own),
        ratio("bound / own weight sync", bound, own, OF_THE_BOUND),
        ratio("own weight sync / slower phase", own, slower),
        checked_share(figures, "own weight sync", args.device, WITHOUT_THE_CHECK),
        checked_share(figures, "adapters alone", args.device),
        ratio(
            "experts one by one / at once",
            figures["experts one by one"],
            figures["experts at once"],
            FASTER_THAN_ONE_BY_ONE,
        ),
        ratio(
            "base and adapters / adapters alone",
            figures["base and adapters"],
            figures["adapters alone"],
            FASTER_THAN_THE_WHOLE,
        ),
        ratio("TRL merges and sends / adapters alone", figures["TRL merges and sends"], figures["adapters alone"]),
        ratio("bytes of an adapter / synced", size, synced, OF_THE_ADAPTER),
    ]
    memory = tuple(
        Figure(name=f"memory of {name}, rank {rank}", unit="MiB", values=(grown / 2**20,))
        for rank, found in enumerate(ranks)
        for name, grown in (found["grown_bytes"] | found["lora"]["grown_bytes"]).items()
    )
    received = tuple(
        Figure(name=f"received by {way}, rank {rank}", unit="MiB", values=(num_bytes / 2**20,))
        for rank, found in enumerate(ranks)
        for way, num_bytes in found["received_bytes"].items()
    )
    return Report(
        benchmark="weight_sync",
        settings={name: ranks[0][name] for name in ("parameters", "wire_mb", "buckets", "bucket_mb", "backend")}
        | {"ranks": len(ranks), "shards": args.shards},
        ratios=tuple(ratios),
        figures=(*figures.values(), bound, *memory, *received, size, synced),
        notes=(
            "experts: {num_experts} in each of {num_hidden_layers} layers, of width {moe_intermediate_size} at "
            "{hidden_size}; ".format(**EXPERTS["short" if args.short else "full"])
            + ", ".join(f"{count} tensors for {name}" for name, count in ranks[0]["experts"]["tensors"].items()),
            f"{args.shards} shards over {len(ranks)} ranks with ZeRO-3, a bfloat16 engine, {cores} cores",
            f"a bucket has {ranks[0]['bucket_mb']} MiB, and there are {ranks[0]['num_buffers']} packed buffers; "
            f"a chunk of TRL's stream has {ranks[0]['chunk_mb']} MiB: as many chunks as TRL's 1 GiB makes of 16 GiB",
            "TRL loads in the process: without packing for a CPU's kernels, which the engine's loading does",
        ),
    )


def main() -> None:
    parser = argument_parser("From ZeRO-3's shards to the engine: our weight sync, TRL's way, and what bounds both.")
    parser.add_argument(
        "--shards", choices=("bfloat16", "float32"), default="bfloat16", help="as a trainer with bf16: true has them"
    )
    parser.add_argument("--bucket-mb", type=int, default=512, help="vllm_sync_bucket_mb")
    args = parser.parse_args()
    if args.short:
        args.repetitions = min(args.repetitions, 2)
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as folder:
        finish(report_of(run_ranks(args, Path(folder)), args), args)


if __name__ == "__main__":
    main()
