"""What it costs a rank to be watched: `python -m bench.timeline`.

A step of a local main makes some twenty spans, and in every five seconds its sampling thread looks once at what all
devices do. Measured is the processor time of both, of the thread that writes and of the one that samples included,
against the time of a step: of one second, which is short for a language model. On GPUs the spans are CUDA events, on
CPUs moments of the clock.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.report import Figure, Ratio, Report, argument_parser, finish
from grpo.config.options import RecordingConfig
from grpo.record.timeline.phases import Phases
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import FORWARD, GENERATE, SCORE, AttemptLine, timeline_path
from grpo.record.timeline.usage import UsageSampler

STEP_S, GOAL_OF_A_STEP = 1.0, 0.002
INTERVAL_S = RecordingConfig.usage_interval_s
SPANS = {FORWARD: 12, SCORE: 6, GENERATE: 2}  # of one step with four micro-batches, three rewards and two engines
STEPS = {"full": 2000, "short": 100}
SAMPLES = {"full": 200, "short": 5}


def cpu_of_a_step_s(device: str, steps: int, folder: Path) -> float:
    """Processor time of this process for a step's spans, writing them included."""
    attempt = AttemptLine(attempt=0, node=0, host="here", time=time.time(), ranks=[0])
    timeline = Recorder(timeline_path(folder, 0), attempt)
    phases = Phases(timeline, on_gpu=device == "cuda")
    begun = time.process_time()
    for step in range(steps):
        timeline.step = step
        now = time.monotonic()
        for _ in range(SPANS[FORWARD]):
            with phases.measured(FORWARD):
                pass
        for _ in range(SPANS[SCORE]):
            timeline.add(SCORE, now, now + 0.01, name="accuracy_reward")
        for _ in range(SPANS[GENERATE]):
            timeline.add(GENERATE, now, now + 0.5, "engine 0", tokens=60_000, requests=64, policy_version=step)
        phases.settle()
    timeline.close()
    return (time.process_time() - begun) / steps


def cpu_of_a_sample_s(devices: list[str], samples: int) -> float:
    """Processor time for one look at all devices and at this process with its children."""
    found: list[Any] = []
    sampler = UsageSampler(
        attempt=0, devices=devices, processes=lambda: {"rank 0": os.getpid()}, put=found.append, interval_s=0
    )
    list(sampler.sample())  # the first one loads NVML
    begun = time.process_time()
    for _ in range(samples):
        list(sampler.sample())
    return (time.process_time() - begun) / samples


def measure(args: argparse.Namespace) -> Report:
    devices = [str(index) for index in range(torch.cuda.device_count())] if args.device == "cuda" else []
    size = "short" if args.short else "full"
    spans, looks = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.repetitions):
            spans.append(cpu_of_a_step_s(args.device, STEPS[size], Path(folder) / str(number)))
            looks.append(cpu_of_a_sample_s(devices, SAMPLES[size]))
    shares = [(span + look * STEP_S / INTERVAL_S) / STEP_S for span, look in zip(spans, looks, strict=True)]
    return Report(
        benchmark="timeline",
        settings={"spans of a step": sum(SPANS.values()), "devices": len(devices)},
        ratios=(
            Ratio(
                name="0.2 % of a step of 1 s / what watching it costs",
                values=tuple(GOAL_OF_A_STEP / share for share in shares),
                goal=1.0,
            ),
        ),
        figures=(
            Figure(name="spans of a step, written", unit="µs", values=tuple(1e6 * each for each in spans)),
            Figure(name="one look at all devices", unit="µs", values=tuple(1e6 * each for each in looks)),
            Figure(name="of a step of 1 s", unit="%", values=tuple(100 * share for share in shares)),
        ),
        notes=(
            "Processor time of the process that trains, all its threads together.",
            f"A look at all devices comes once in {INTERVAL_S:g} s (usage_interval_s).",
        ),
    )


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    finish(measure(args), args)


if __name__ == "__main__":
    main()
