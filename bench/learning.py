"""Does sampling ahead learn as well: the demo's final reward with `generation_lookahead` 1 and 0, several seeds.

Not part of `make bench`: it is six runs of the demo.

    python -m bench.learning
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import Figure, Report, argument_parser, finish, ratio
from examples.demo_model import ensure_demo_model

ROOT = Path(__file__).resolve().parent.parent
FIRST_SEED = 42
LAST_STEPS = 20  # whose mean is the final reward
RUN_TIMEOUT_S = 900


def train(
    model: Path, output_dir: Path, *, seed: int, lookahead: int, steps: int, device: str, eager: bool
) -> tuple[float, float]:
    """One run of the demo, as a user starts it. Returns its final reward and its seconds after the first step."""
    shutil.copytree(model, output_dir / "model")  # warmed up once, for all runs
    config = "cpu.yaml" if device == "cpu" else "1node.yaml"
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "configs" / config), str(ROOT / "train.py")]
    command += ["--output_dir", str(output_dir), "--seed", str(seed), "--max_steps", str(steps)]
    command += ["--generation_lookahead", str(lookahead), "--logging_steps", "1", "--disable_tqdm", "True"]
    if eager:  # an engine that is ready soon
        command += ["--vllm_engine_kwargs", '{"enforce_eager": true}']
    run = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert len(rewards) == steps, f"{len(rewards)} rewards of {steps} steps"
    final = sum(rewards[-LAST_STEPS:]) / min(LAST_STEPS, steps)
    seconds = sum(line["step_time"] for line in lines[1:] if "step_time" in line)  # the first waits for the engine
    print(f"seed {seed}, lookahead {lookahead}: {rewards[0]:.3f} -> {final:.3f}")
    return final, seconds


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run")
    parser.set_defaults(repetitions=3)
    args = parser.parse_args()
    if args.short:
        args.steps, args.repetitions = 3, 1
    rewards: dict[int, list[float]] = {0: [], 1: []}
    seconds: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory(prefix="bench-learning-") as folder:
        model = ensure_demo_model(Path(folder) / "model", max_steps=2 if args.short else None)
        for seed in range(FIRST_SEED, FIRST_SEED + args.repetitions):
            for lookahead in (0, 1):
                output_dir = Path(folder) / f"seed-{seed}-lookahead-{lookahead}"
                reward, run_s = train(
                    model,
                    output_dir,
                    seed=seed,
                    lookahead=lookahead,
                    steps=args.steps,
                    device=args.device,
                    eager=args.short,
                )
                rewards[lookahead].append(reward)
                seconds[lookahead].append(run_s)

    on_policy, ahead = (
        Figure(name=f"reward of the last {LAST_STEPS} steps, lookahead {k}", unit="", values=tuple(rewards[k]))
        for k in (0, 1)
    )
    times = [Figure(name=f"all steps but the first, lookahead {k}", unit="s", values=tuple(seconds[k])) for k in (0, 1)]
    report = Report(
        benchmark="learning",
        settings={"steps": args.steps, "seeds": args.repetitions},
        ratios=(
            ratio("final reward, lookahead 1 / lookahead 0", ahead, on_policy),
            ratio("steps/s, lookahead 1 / lookahead 0", times[0], times[1]),
        ),
        figures=(on_policy, ahead, *times),
        notes=("ranks and engine share the cores here: no time is to be won; `bench.overlap` measures that",),
    )
    finish(report, args)


if __name__ == "__main__":
    main()
