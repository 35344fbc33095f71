"""Output folders as runs of any size leave them, made up in seconds: for what reads them. docs/metrics.md says what is
in them; `tests/multiprocess` holds a real run's folder against the same words.

    python -m tests.support.made_runs FOLDER [--steps 300] [--nodes 4] [--fault slow-node]
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo.record.timeline import records
from grpo.record.timeline.records import AttemptLine, Span, Usage

RANKS_PER_NODE = 7
BEGAN = 1_790_000_000.0
FAULTS = {
    "": "a healthy run",
    "slow-node": "node 1 samples at half the speed",
    "idle-engines": "engines wait for the ranks for half of the time",
    "waiting-ranks": "ranks wait for the engines for most of the time",
    "long-tail": "ranks wait for the longest completions of a batch, although engines sample ahead",
    "slow-reward": "a reward function takes a third of each step",
    "slow-sync": "the weight sync takes a third of each step",
    "slow-save": "saving takes a fifth of the time",
    "no-spread": "most groups have the same reward for all their completions",
    "clipped": "most completions end at their longest length",
    "refused": "prompts are left out, because no engine takes them",
    "restarts": "engines die and come back",
    "gap": "the log-probabilities of engine and trainer are apart",
    "drift": "in the second half of the steps the engines of node 1 hold other weights than the trainer",
    "failed": "the first attempt failed, the second goes on",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRun:
    """What to make up."""

    steps: int = 300
    nodes: int = 4
    fault: str = ""
    """One of `FAULTS`."""
    seed: int = 0
    save_every: int = 50
    lost: int = 0
    """Of `failed`: steps that the second attempt makes again."""
    renumbers: bool = False
    """Of `failed`: the second attempt is another job's, whose attempts count from 0 again."""
    log_completions_every: int = 10
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of a step's parts, where they are not the usual ones."""

    def seconds(self) -> dict[str, float]:
        usual = {"generate": 20.0, "score": 0.6, "old": 1.5, "reference": 1.5, "forward": 5.0, "backward": 10.0}
        usual |= {"optimizer": 1.0, "sync": 0.8, "save": 4.0}
        usual |= {
            "idle-engines": {"generate": 12.0},
            "waiting-ranks": {"generate": 50.0},
            "long-tail": {"generate": 50.0},
            "slow-reward": {"score": 18.0},
            "slow-sync": {"sync": 18.0},
            "slow-save": {"save": 450.0},
        }.get(self.fault, {})
        return usual | self.times


def make_run(folder: Path, run: MadeRun) -> Path:
    """Write a run's folder, and return it. Generation of the next batch goes on beside training (lookahead 1), but
    with the faults `idle-engines` and `waiting-ranks`."""
    rng = np.random.default_rng(run.seed)
    (folder / records.TIMELINE_FOLDER).mkdir(parents=True)
    (folder / "completions").mkdir()
    (folder / "logs").mkdir()
    timelines = [records.timeline_path(folder, node).open("w") for node in range(run.nodes)]
    attempts = [(0, 0, run.steps)]  # number, first step, last
    if run.fault == "failed":
        half = run.steps // 2
        attempts = [(0, 0, half), (0 if run.renumbers else 1, half - run.lost, run.steps)]
    metrics: dict[int, dict[str, Any]] = {}
    clock = BEGAN
    times: list[tuple[float, float]] = []
    for attempt, first, last in attempts:
        for node, file in enumerate(timelines):
            file.write(records.to_line(_attempt(attempt, node, clock)) + "\n")
        began, clock = clock, clock + 60.0
        for node, file in enumerate(timelines):
            start = Span(attempt=attempt, lane=_lane(node), phase=records.START, begin=began, end=clock, step=first)
            file.write(records.to_line(start) + "\n")
        for step in range(first, last):
            begin = clock
            clock, by_node = _step(run, attempt, step, clock, timelines, rng)
            metrics[step] = _metrics(run, attempt, step + 1, clock, clock - begin, by_node, rng)
            if (step + 1) % run.log_completions_every == 0:
                _completions(folder, run, attempt, step + 1, clock, rng)
        times.append((began, clock))
        clock += 120.0
    for file in timelines:
        file.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics.values()))
    _write_states(folder, run, attempts, times)
    for node in range(run.nodes):
        log = folder / "logs" / f"engine-node{node}-0.attempt-{attempts[-1][0]}.log"
        log.write_text("INFO: the engine is ready\nERROR: CUDA error: an illegal memory access was encountered\n")
    return folder


def _lane(node: int) -> str:
    return f"rank {node * RANKS_PER_NODE}"


def _attempt(attempt: int, node: int, time: float) -> AttemptLine:
    first = node * RANKS_PER_NODE
    return AttemptLine(
        attempt=attempt,
        node=node,
        host=f"gpu-{node:02}",
        time=time,
        clock_offset_s=0.01 * node,
        ranks=[*range(first, first + RANKS_PER_NODE)],
        rank_devices=[str(device) for device in range(RANKS_PER_NODE)],
        engine_devices=[[str(RANKS_PER_NODE)]],
    )


def _step(
    run: MadeRun, attempt: int, step: int, clock: float, timelines: list[Any], rng: np.random.Generator
) -> tuple[float, dict[str, list[float]]]:
    """Write one step's spans of all nodes: its end, and each node's figures."""
    seconds = run.seconds()
    train = sum(seconds[part] for part in ("score", "old", "reference", "forward", "backward", "optimizer"))
    looks_ahead = run.fault not in ("idle-engines", "waiting-ranks")
    noise = rng.lognormal(0, 0.06, run.nodes)
    generate = (
        seconds["generate"] * noise * np.where((np.arange(run.nodes) == 1) & (run.fault == "slow-node"), 2.0, 1.0)
    )
    wait = np.maximum(generate - train, 0.0) if looks_ahead else generate
    trained_from = clock + wait.max() + 0.05
    end = trained_from + train + seconds["sync"] + (seconds["save"] if (step + 1) % run.save_every == 0 else 0)
    by_node: dict[str, list[float]] = {
        name: [] for name in ("generate_s", "tokens_per_s", "wait_s", "idle_s", "sync_s")
    }
    for node, file in enumerate(timelines):
        tokens = int(rng.normal(60_000, 3_000))
        for span in _spans(run, attempt, step, clock, trained_from, node, float(generate[node]), tokens, seconds):
            file.write(records.to_line(span) + "\n")
        for usage in _usages(attempt, node, clock, end, train, float(generate[node])):
            file.write(records.to_line(usage) + "\n")
        by_node["generate_s"].append(float(generate[node]))
        by_node["tokens_per_s"].append(tokens / float(generate[node]))
        by_node["wait_s"].append(float(wait.max()))
        by_node["idle_s"].append(max(0.0, end - clock - float(generate[node]) - seconds["sync"]))
        by_node["sync_s"].append(seconds["sync"])
    return end, by_node


def _spans(
    run: MadeRun,
    attempt: int,
    step: int,
    clock: float,
    trained_from: float,
    node: int,
    generate: float,
    tokens: int,
    seconds: dict[str, float],
) -> Iterator[Span]:
    common: dict[str, Any] = {"attempt": attempt, "step": step}
    yield Span(
        lane="engine 0",
        phase=records.GENERATE,
        begin=clock,
        end=clock + generate,
        tokens=tokens,
        requests=64,
        policy_version=step,
        **common,
    )
    if run.fault == "restarts" and node == 0 and step % 40 == 39:
        yield Span(lane="engine 0", phase=records.RESTART, begin=clock + 2, end=clock + 28, **common)
    lane, at = _lane(node), trained_from
    if trained_from - clock > 0.05:
        yield Span(lane=lane, phase=records.WAIT_GENERATE, begin=clock, end=trained_from, **common)
    parts = [
        (records.SCORE, "accuracy", seconds["score"] * 0.9),
        (records.SCORE, "format", seconds["score"] * 0.1),
        (records.OLD_LOGPROBS, "", seconds["old"]),
        (records.REFERENCE_LOGPROBS, "", seconds["reference"]),
        (records.FORWARD, "", seconds["forward"]),
        (records.BACKWARD, "", seconds["backward"]),
        (records.OPTIMIZER, "", seconds["optimizer"]),
        (records.SYNC, "", seconds["sync"]),
    ]
    if (step + 1) % run.save_every == 0:
        parts.append((records.SAVE, "", seconds["save"]))
    for phase, name, length in parts:
        on_gpu = phase in (records.FORWARD, records.BACKWARD, records.OPTIMIZER)
        yield Span(lane=lane, phase=phase, name=name, begin=at, end=at + length, on_gpu=on_gpu, **common)
        if phase == records.SYNC:
            yield Span(lane="sync", phase=records.SYNC_GATHER, begin=at, end=at + length * 0.8, **common)
            yield Span(
                lane="sync",
                phase=records.SYNC_SEND,
                begin=at + length * 0.1,
                end=at + length,
                bytes=15_000_000_000,
                **common,
            )
        at += length


def _usages(attempt: int, node: int, begin: float, end: float, train: float, generate: float) -> Iterator[Usage]:
    for device in range(RANKS_PER_NODE + 1):
        is_engine = device == RANKS_PER_NODE
        busy = min(1.0, (generate if is_engine else train) / (end - begin))
        yield Usage(
            attempt=attempt,
            time=end,
            device=str(device),
            busy=round(busy, 3),
            memory_bytes=60 * 2**30,
            memory_total_bytes=80 * 2**30,
            power_w=300 + 350 * busy,
            allocated_bytes=40 * 2**30 if device == 0 else None,
            reserved_bytes=55 * 2**30 if device == 0 else None,
        )


def _metrics(
    run: MadeRun,
    attempt: int,
    step: int,
    time: float,
    step_s: float,
    by_node: dict[str, list[float]],
    rng: np.random.Generator,
) -> dict[str, Any]:
    reward = 0.2 + 0.6 * (1 - np.exp(-step / (run.steps / 3))) + rng.normal(0, 0.02)
    zero_spread = 0.85 if run.fault == "no-spread" else 0.2
    clipped = 0.7 if run.fault == "clipped" else 0.04
    gap = 0.14 if run.fault == "gap" else 0.012
    line: dict[str, Any] = {"step": step, "time": time, "attempt": attempt}
    line |= {"loss": rng.normal(0, 0.01), "grad_norm": float(rng.lognormal(-1, 0.2)), "learning_rate": 1e-6}
    line |= {"reward": float(reward), "reward_std": 0.3, "frac_reward_zero_std": zero_spread}
    line |= {"rewards/accuracy/mean": float(reward * 0.8), "rewards/accuracy/std": 0.35}
    line |= {"rewards/format/mean": float(reward * 0.2), "rewards/format/std": 0.05}
    line |= {"entropy": float(0.6 * np.exp(-step / run.steps) + 0.1), "kl": float(0.001 * step / run.steps)}
    line |= {"completions/mean_length": 400 + 0.5 * step, "completions/min_length": 40.0}
    longest = 4096.0 if run.fault == "long-tail" else 1024.0
    line |= {"completions/max_length": longest, "completions/clipped_ratio": clipped}
    line |= {"completions/length_p10": 120 + 0.2 * step, "completions/length_p50": 380 + 0.5 * step}
    line |= {"completions/length_p90": min(1024.0, 700 + 0.6 * step)}
    line |= {"clip_ratio/region_mean": 0.01, "step_time": step_s, "num_tokens": 500_000.0 * step}
    line |= {"sampling/importance_sampling_ratio/clipped_share": 0.004}
    for name, figures in (
        ("rollout/generate_s", by_node["generate_s"]),
        ("rollout/tokens_per_s", by_node["tokens_per_s"]),
        ("rollout/wait_s", by_node["wait_s"]),
        ("engine/idle_s", by_node["idle_s"]),
        ("weight_sync/total_s", by_node["sync_s"]),
    ):
        line |= {name: float(np.mean(figures)), f"{name}_min": min(figures), f"{name}_max": max(figures)}
        line.setdefault("by_node", {})[name] = [round(each, 4) for each in figures]
    line |= {"rollout/wait_share": line["rollout/wait_s"] / step_s, "engine/idle_share": line["engine/idle_s"] / step_s}
    line |= {"rollout/slowest_node": float(np.argmax(by_node["generate_s"]))}
    line |= {"rollout/policy_lag": 1.0, "rollout/policy_lag_steps": 1.0, "engine/policy_version": step - 1}
    line |= {"rollout/refused": 2.0 if run.fault == "refused" else 0.0}
    line |= {"engine/restarts": float(step // 40) if run.fault == "restarts" else 0.0}
    if run.fault == "drift":
        gaps = [0.09 if node == 1 and step > run.steps / 2 else 0.012 for node in range(run.nodes)]
        line |= {"sampling/logprob_gap": float(np.mean(gaps)), "sampling/gap_alarms": float(step > run.steps / 2)}
        line["by_node"]["sampling/logprob_gap"] = gaps
    line |= {
        "weight_sync/logprob_gap_mean": gap,
        "weight_sync/logprob_gap_max": 10 * gap,
        "weight_sync/logprob_gap_judged": gap,
    }
    line |= {"weight_sync/logprob_gap_limit": 0.15}
    return line | {"epoch": step / run.steps}


def _completions(folder: Path, run: MadeRun, attempt: int, step: int, time: float, rng: np.random.Generator) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for number in range(8):
        prompt = (step // run.log_completions_every + number) % 24 if number >= 4 else number  # some come again
        for sample in range(8):
            good = bool(rng.random() < 0.2 + 0.6 * step / run.steps)
            answer = 17 + prompt if good else int(rng.integers(100))
            rows.append(
                {
                    "time": time,
                    "attempt": attempt,
                    "step": step,
                    "prompt_id": f"{prompt:08x}",
                    "prompt": f"What is {prompt} + 17? Think, then <answer>.",
                    "completion": f"{prompt} and 17 make {answer}. <b>Sample</b> {sample}\n<answer>{answer}</answer>",
                    "reward": float(good) + 0.2,
                    "rewards/accuracy": float(good),
                    "rewards/format": 0.2,
                    "advantage": float(good) - 0.5,
                    "node": number % run.nodes,
                    "engine": 0,
                    "policy_version": step - 1,
                    "prompt_tokens": 20,
                    "completion_tokens": 40 + int(rng.integers(60)),
                    "stop_reason": "stop" if sample else "length",
                }
            )
    pq.write_table(pa.Table.from_pylist(rows), folder / "completions" / f"step-{step:08}.parquet")


def _write_states(
    folder: Path, run: MadeRun, attempts: list[tuple[int, int, int]], times: list[tuple[float, float]]
) -> None:
    reported: list[dict[str, Any]] = []
    for (attempt, first, last), (began, ended) in zip(attempts, times, strict=True):
        is_last = len(reported) == len(attempts) - 1
        record = {
            "node": 1,
            "rank": 8,
            "host": "gpu-01",
            "phase": "sync",
            "kind": "engine",
            "cause": "EngineDied: the engine was killed by signal 9 [GRPO-406]: its last words",
        }
        reported.append(
            {
                "attempt": attempt,
                "job": "4711",
                "started": began,
                "ended": ended,
                "state": "finished" if is_last else "failed",
                "from_step": first,
                "step": last,
                "why": "" if is_last else "JobFailed: the job failed on node 1",
                "kind": "engine",
                "failure": None if is_last else record,
                "restarts": [],
                "command": ["train.py", "--config", "configs/train/gsm8k.yaml"],
                "arguments": {
                    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
                    "max_steps": run.steps,
                    "generation_lookahead": int(run.fault not in ("idle-engines", "waiting-ranks")),
                    "max_completion_length": 1024,
                    "num_generations": 8,
                    "learning_rate": 1e-6,
                    "vllm_reserved_gpus": 1,
                    "save_steps": run.save_every,
                },
                "changed": ["model_name_or_path", "max_steps", "generation_lookahead"],
                "versions": {"grpo": "0.1.0", "torch": "2.13.0", "vllm": "0.31.0", "trl": "1.16.0"},
                "python": "3.11.7",
                "commit": "0123456789abcdef",
                "topology": {
                    "num_nodes": run.nodes,
                    "world_size": run.nodes * RANKS_PER_NODE,
                    "ranks_by_node": [RANKS_PER_NODE] * run.nodes,
                    "engines_by_node": [1] * run.nodes,
                    "tensor_parallel_size": 1,
                    "hosts": [f"gpu-{node:02}" for node in range(run.nodes)],
                    "has_gpus": True,
                },
            }
        )
    (folder / "run.json").write_text(json.dumps({"attempts": reported}, indent=1))
    state = {"state": "finished", "why": "", "job": "4711", "attempt": attempts[-1][0], "step": run.steps}
    (folder / "run_state.json").write_text(json.dumps(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--fault", choices=list(FAULTS), default="")
    options = parser.parse_args()
    print(make_run(options.folder, MadeRun(steps=options.steps, nodes=options.nodes, fault=options.fault)))


if __name__ == "__main__":
    main()
