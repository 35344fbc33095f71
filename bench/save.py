"""How long a save holds training, under ZeRO-3 on two ranks: `python -m bench.save`.

In turns, the same state to the same disk:

- `as before`: transformers' save, and a record of sizes alone. Nothing is on the disk when training goes on.
- `beside training`: ours. The ranks write, and go on; then every file goes to the disk and is read for its checksum,
  and `complete.json` follows.
- `at once`: ours, where training waits until the checkpoint is complete, as a stop does.
- `shards alone`: beside training, without the gathered 16-bit copy of the model (`zero3_save_16bit_model: false`).

What counts is seconds for each GB of the checkpoint in which the ranks do nothing else. Between turns everything is on
the disk and deleted, so that no turn pays for another's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import Figure, Report, argument_parser, finish, ratio

JOB_S = 420
SHAPES = {  # of a Qwen2 with a tied head; the full one has 46 M parameters
    "full": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 16384},
    "short": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1024},
}
AS_FAST_AS_BEFORE = 0.9  # the checksums and the disk come beside training, not on top


def run_ranks(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the ranks, wait for them, and return what rank 0 measured.

    Raises:
        RuntimeError: they failed, or took longer than `JOB_S`; with the end of their output.
    """
    settings = {
        "folder": str(folder),
        "cpu": args.device == "cpu",
        "shape": SHAPES["short" if args.short else "full"],
        "repetitions": args.repetitions,
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if args.device == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    log = folder / "ranks.log"
    with log.open("wb") as sink:
        job = subprocess.Popen(
            [*launcher, "-m", "bench.save_ranks", str(path)], stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code = job.wait(JOB_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait(60)
            code = None
    if code != 0:
        how = f"still ran after {JOB_S} s" if code is None else f"ended with exit code {code}"
        raise RuntimeError(f"the ranks {how}:\n{log.read_text(errors='replace')[-6000:]}")
    return json.loads((folder / "0.json").read_text())


def report_of(found: dict[str, Any]) -> Report:
    held = {
        name: Figure(
            name=f"held for a GB, {name}",
            unit="s/GB",
            values=tuple(s / found["gigabytes"][name] for s in seconds),
        )
        for name, seconds in found["seconds"].items()
    }
    # For each GB of state, which both save: the gathered copy is what one of them leaves out.
    seconds = {name: Figure(name=name, unit="s", values=tuple(values)) for name, values in found["seconds"].items()}
    before, beside = seconds["as before"], seconds["beside training"]
    return Report(
        benchmark="save",
        settings={"parameters": found["parameters"], "ranks": 2},
        ratios=(
            ratio("as before / beside training", before, beside, AS_FAST_AS_BEFORE),
            ratio("at once / beside training", seconds["at once"], beside),
            ratio("beside training / shards alone", beside, seconds["shards alone"]),
        ),
        figures=(
            *held.values(),
            *(Figure(name=f"held, {name}", unit="s", values=each.values) for name, each in seconds.items()),
            Figure(name="until complete, beside training", unit="s", values=tuple(found["until_complete"])),
            *(Figure(name=f"size, {name}", unit="GB", values=(size,)) for name, size in found["gigabytes"].items()),
        ),
        notes=(
            f"float32 under ZeRO-3 on 2 ranks, to {found['filesystem']}; what the ranks do meanwhile is not measured",
        ),
    )


def main() -> None:
    parser = argument_parser("How long a save holds training: as before, beside it, at once, without a gathered copy.")
    parser.add_argument("--folder", type=Path, help="where to save (default: the folder for temporary files)")
    args = parser.parse_args()
    if args.short:
        args.repetitions = min(args.repetitions, 2)
    with tempfile.TemporaryDirectory(prefix="grpo-bench-", dir=args.folder) as folder:
        finish(report_of(run_ranks(args, Path(folder))), args)


if __name__ == "__main__":
    main()
