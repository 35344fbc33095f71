"""Launch to first step: engines and trainer side by side, one after the other, and TRL without an engine.

`python -m bench.startup` starts five jobs in turn, each as a user starts it: `accelerate launch` with a tiny model
and one optimizer step on two ranks (on GPUs: on all but one).

- side by side: `train.py`. The engine's host imports vLLM while the ranks import the trainer.
- late host: the same, but the host starts with its engine, when the trainer is made (`bench/late_host.py`).
- own script: a script of a user's (`bench/own_script.py`), in which the host starts when the trainer is
  made, before anything else is done there.
- one after the other: `late host`, and the ranks go on when the engines are ready (`bench/serial_start.py`).
- TRL, transformers generation: TRL's own script with `use_vllm: false`, which a user would pick who will not wait for
  an engine. What it costs later is the subject of `bench.generate`.

Seconds count from the start of the launcher until the first step's line stands in its output. A start of `train.py`
that does not count goes before, so that no variant is the one that fills caches (files, compiled kernels, DeepSpeed's
extension). No start ends before the CPU time of all its processes is worked off by all cores: that is the bound.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import torch

from bench.report import Figure, Report, argument_parser, finish, interleave, ratio
from grpo.ops.train.demo import MODEL, demo_dataset
from grpo.record.files import METRICS_FILE

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 600.0  # of one job; the first one may have to build DeepSpeed's extension
FIRST_STEPS = ("[grpo] step 1/", "{'loss': ")  # how the line of a step begins: ours, and transformers' under TRL
SIDE_BY_SIDE = "side by side"
LATE_HOST = "late host"
OWN_SCRIPT = "own script"
ONE_AFTER_THE_OTHER = "one after the other"
TRL = "TRL, transformers generation"
ENGINE_START = "startup/engine_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One job's start, as seen from outside, and what its trainer says of it."""

    first_step_s: float
    cpu_s: float
    """Of all its processes, until the first step."""
    reported_s: dict[str, float] = field(default_factory=dict)
    """The trainer's `startup/*_s`; empty for TRL's."""


def commands(model: str, data: Path, *, device: str, short: bool) -> dict[str, list[str]]:
    """What starts each variant; `--output_dir` is still to come.

    Args:
        short: one rank, and an engine that compiles nothing.
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise ValueError("the ranks and an engine need two GPUs: use --device cpu, or a machine that has them")
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--main_process_port", "0"]
    if device == "cuda":
        launcher += ["--config_file", str(ROOT / "configs" / "1node.yaml")]
        launcher += ["--num_processes", "1" if short else str(torch.cuda.device_count() - 1)]
    else:
        launcher += ["--config_file", str(ROOT / "configs" / "cpu.yaml"), "--num_processes", "1" if short else "2"]
    task = {
        "model_name_or_path": model,
        "dataset_name": data,
        "reward_funcs": "get_soft_overlong_punishment",  # takes any completion
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 8,
        "max_steps": 1,
        "logging_steps": 1,
        "disable_tqdm": True,  # steps are printed as lines
        "bf16": device == "cuda",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
    }
    flags = _flags(task)
    own = [*flags, *_flags({"vllm_max_model_length": 64})]
    own += _flags({"vllm_engine_kwargs": json.dumps({"enforce_eager": True})}) if short else []
    without_engine = [*flags, *_flags({"use_vllm": False, "use_cpu": device == "cpu"})]
    return {
        SIDE_BY_SIDE: [*launcher, str(ROOT / "train.py"), *own],
        LATE_HOST: [*launcher, str(ROOT / "bench" / "late_host.py"), *own],
        OWN_SCRIPT: [*launcher, str(ROOT / "bench" / "own_script.py"), *own],
        ONE_AFTER_THE_OTHER: [*launcher, str(ROOT / "bench" / "serial_start.py"), *own],
        TRL: [*launcher, "-m", "trl.scripts.grpo", *without_engine],
    }


def _flags(settings: Mapping[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def launch(command: list[str], folder: Path) -> Launch:
    """Runs one job to its end, in a folder of its own.

    Raises RuntimeError with the end of its output when it fails or takes longer than `DEADLINE_S`.
    """
    folder.mkdir()
    log = folder / "output.log"
    with log.open("wb") as sink:
        began = time.monotonic()
        process = psutil.Popen(
            [*command, "--output_dir", str(folder / "run")],
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        )
    with _ended(process):
        while not any(line in log.read_text(errors="replace") for line in FIRST_STEPS):
            if process.poll() is not None or time.monotonic() - began > DEADLINE_S:
                raise RuntimeError(_what_happened("no first step", process, log))
            time.sleep(0.05)
        first_step_s = time.monotonic() - began
        cpu_s = sum(_cpu_s(each) for each in [process, *process.children(recursive=True)])
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(DEADLINE_S)
        if process.returncode != 0:
            raise RuntimeError(_what_happened("the job did not end well", process, log))
    metrics_file = folder / "run" / METRICS_FILE
    metrics = json.loads(metrics_file.read_text().splitlines()[0]) if metrics_file.exists() else {}
    reported_s = {name: value for name, value in metrics.items() if name.startswith("startup/")}
    return Launch(first_step_s=first_step_s, cpu_s=cpu_s, reported_s=reported_s)


@contextlib.contextmanager
def _ended(process: psutil.Popen) -> Iterator[None]:
    """However the block is left, the job's processes are gone."""
    try:
        yield
    finally:
        if process.poll() is None:
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


def _cpu_s(process: psutil.Process) -> float:
    """Its own time, and that of children that have ended."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


def _what_happened(what: str, process: psutil.Popen, log: Path) -> str:
    code = "it still runs" if process.poll() is None else f"exit code {process.returncode}"
    return f"{what} within {DEADLINE_S:.0f} s ({code}):\n{log.read_text(errors='replace')[-4000:]}"


def measure(args: argparse.Namespace, folder: Path) -> Report:
    """Starts the jobs in turn; `folder` is empty."""
    data = folder / "data"
    data.mkdir()
    demo_dataset("train").to_json(data / "train.jsonl")
    model = args.model or str(MODEL)
    jobs = commands(model, data, device=args.device, short=args.short)
    if args.short:
        del jobs[TRL], jobs[LATE_HOST], jobs[OWN_SCRIPT]  # two jobs take most of a minute
    else:
        launch(jobs[SIDE_BY_SIDE], folder / "warm-up")
    launches: dict[str, list[Launch]] = {name: [] for name in jobs}

    def run(name: str) -> float:
        launches[name].append(launch(jobs[name], folder / f"{name} {len(launches[name])}"))
        return launches[name][-1].first_step_s

    seconds = interleave({name: partial(run, name) for name in jobs}, args.repetitions)
    first_step = {name: Figure(name=name, unit="s", values=tuple(values)) for name, values in seconds.items()}
    own = launches[SIDE_BY_SIDE]
    cores = len(os.sched_getaffinity(0))
    bound = Figure(
        name=f"side by side: CPU time of all processes over {cores} cores",
        unit="s",
        values=tuple(each.cpu_s / cores for each in own),
    )
    reported = [
        Figure(name=f"{SIDE_BY_SIDE}: {name}", unit="s", values=tuple(each.reported_s[name] for each in own))
        for name in own[0].reported_s
    ]
    alone = tuple(each.reported_s[ENGINE_START] for each in launches[ONE_AFTER_THE_OTHER])
    reported.append(Figure(name=f"{ONE_AFTER_THE_OTHER}: {ENGINE_START}", unit="s", values=alone))
    return Report(
        benchmark="startup",
        settings={"model": args.model or "the demo's"},
        ratios=(
            *(
                ratio(f"{name} / {SIDE_BY_SIDE}", figure, first_step[SIDE_BY_SIDE])
                for name, figure in first_step.items()
                if name != SIDE_BY_SIDE
            ),
            ratio("bound by CPU time / side by side", bound, first_step[SIDE_BY_SIDE]),
        ),
        figures=(*first_step.values(), bound, *reported),
        notes=(
            "Seconds from the start of `accelerate launch` to the first step's line; startup/* is the trainer's own "
            "report, from the start of rank 0's process.",
        ),
    )


def main() -> None:
    parser = argument_parser("Launch to first step: side by side, one after the other, and without an engine.")
    parser.add_argument("--model", help="a folder or hub id (default: the demo's model)")
    parser.set_defaults(repetitions=3)
    args = parser.parse_args()
    if args.short:
        args.repetitions = 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a job that is running ends, too
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as folder:
        finish(measure(args, Path(folder)), args)


if __name__ == "__main__":
    main()
