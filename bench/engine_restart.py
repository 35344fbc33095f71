"""What an engine's death costs: seconds from the kill to the next completion, without and with a standby process.

A tiny model, one rank, no training: the engine host is killed at rest, then a weight sync and a completion are asked
for. The time holds the start of the engine, the weight sync, its proof and the completion. With `--learning` the demo
is trained, too, with a kill in the middle of a generation every 25 steps, beside undisturbed runs of three seeds.

    python -m bench.engine_restart [--learning]
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

from bench.engines import config, save_model
from bench.generate import local_vllm
from bench.learning import FIRST_SEED, LAST_STEPS, RUN_TIMEOUT_S
from bench.report import Figure, Report, argument_parser, finish, interleave, ratio
from grpo.engine.like import EngineLike
from grpo.local_vllm import LocalVLLM
from grpo.place.topology import read_topology

ROOT = Path(__file__).resolve().parent.parent
KILL_EVERY = 25
QUIET_S = 3.0  # a host that has imported vLLM uses no processor for so long
DEADLINE_S = 300.0


def until_hosts_wait(engine: EngineLike) -> None:
    """Until this process's other hosts have imported what they import, and wait."""
    deadline, quiet_since, before = time.monotonic() + DEADLINE_S, time.monotonic(), -1.0
    while time.monotonic() < deadline:
        children = [each for each in psutil.Process().children() if each.pid != engine.pid]
        used = sum(sum(each.cpu_times()[:2]) for each in children)
        if used != before:
            quiet_since, before = time.monotonic(), used
        if time.monotonic() - quiet_since > QUIET_S:
            return
        time.sleep(0.2)
    raise RuntimeError(f"a host is not ready after {DEADLINE_S:.0f} s")


def kill_and_go_on(local: LocalVLLM) -> float:
    """Seconds from the engine's death to the first completion of the next one."""
    (engine,) = local.engines.clients
    until_hosts_wait(engine)
    begun = time.monotonic()
    os.kill(engine.pid, signal.SIGKILL)
    local.sync_weights()
    local.generate([[5, 6, 7]], None, 1)
    seconds = time.monotonic() - begun
    assert local.engines.clients[0] is not engine
    return seconds


def measure(folder: Path, device: str, repetitions: int) -> dict[str, list[float]]:
    model = save_model(folder / "model", "tiny", weights=True)
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True)
    topology = read_topology(
        use_cpu=device == "cpu", reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None, env=dict(os.environ)
    )
    if device == "cuda":
        trained = trained.to("cuda")

    def run(name: str) -> float:
        settings = {"vllm_max_restarts": 1, "vllm_standby": name == "standby", "max_completion_length": 8}
        args = config(folder / name, device, **settings)
        with local_vllm(args, model, topology, trained) as local:
            local.sync_weights()
            local.generate([[5, 6, 7]], None, 1)
            return kill_and_go_on(local)

    return interleave({name: lambda name=name: run(name) for name in ("cold", "standby")}, repetitions)  # type: ignore[misc]


def train(output_dir: Path, *, seed: int, steps: int, kills: bool) -> float:
    """One run of the demo; its final reward."""
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--main_process_port", "0"]
    script = "bench/killed_engines.py" if kills else "train.py"
    command += ["--config_file", str(ROOT / "configs" / "cpu.yaml"), str(ROOT / script)]
    command += ["--output_dir", str(output_dir), "--seed", str(seed), "--max_steps", str(steps)]
    command += ["--logging_steps", "1", "--disable_tqdm", "True", "--vllm_max_restarts", str(steps)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KILL_EVERY": str(KILL_EVERY)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * RUN_TIMEOUT_S, check=False, env=env)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    num_restarts = [line["engine/restarts"] for line in lines if "engine/restarts" in line][-1]
    assert num_restarts == ((steps - 1) // KILL_EVERY if kills else 0), num_restarts
    print(f"seed {seed}, {num_restarts:.0f} engines killed: {rewards[0]:.3f} -> {_final(rewards):.3f}", flush=True)
    return _final(rewards)


def _final(rewards: list[float]) -> float:
    return sum(rewards[-LAST_STEPS:]) / len(rewards[-LAST_STEPS:])


def learn(folder: Path, steps: int) -> tuple[Figure, Figure]:
    seeds = range(FIRST_SEED, FIRST_SEED + 3)
    killed = train(folder / "killed", seed=FIRST_SEED, steps=steps, kills=True)
    whole = [train(folder / f"seed-{seed}", seed=seed, steps=steps, kills=False) for seed in seeds]
    name = f"reward of the last {LAST_STEPS} of {steps} steps"
    return (
        Figure(name=f"{name}, three seeds", unit="", values=tuple(whole)),
        Figure(name=f"{name}, a kill every {KILL_EVERY} steps, the first seed", unit="", values=(killed,)),
    )


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--learning", action="store_true", help="train the demo, too; four runs")
    parser.add_argument("--steps", type=int, default=150, help="of a run with --learning")
    parser.set_defaults(repetitions=3)
    args = parser.parse_args()
    if args.short:
        args.repetitions = 1
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as name:
        folder = Path(name)
        seconds = measure(folder, args.device, args.repetitions)
        learnt = learn(folder, args.steps) if args.learning else ()
    cold, standby = (
        Figure(name=f"from the kill to the next completion, {name}", unit="s", values=tuple(seconds[name]))
        for name in ("cold", "standby")
    )
    finish(
        Report(
            benchmark="engine_restart",
            settings={"kill_every": KILL_EVERY} if learnt else {},
            ratios=(ratio("cold / with a standby process", cold, standby),),
            figures=(cold, standby, *learnt),
            notes=("the start of the engine, the weight sync, its proof and the completion are in it",),
        ),
        args,
    )


if __name__ == "__main__":
    main()
