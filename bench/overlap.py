"""Sampling ahead against sampling on-policy: `generation_lookahead` 1 and 0 in turn.

One training process and one engine, as on a node with one GPU for each. Without GPUs the process is pinned to one core
and the engine to another, and a model, batch and length are taken for which generating and training take about as long.

The bound follows from the phases of the on-policy steps, in which ranks and engine never work at the same time: with g
the wait for completions, p the weight sync and t the rest, such a step takes g + p + t, and an overlapped one max(g, t)
+ p at least, since a weight sync needs the engine at rest.

    python -m bench.overlap [--device cuda]
    python -m bench.overlap --ragged            # lengths by chance, up to 4 batches under way: bench/overlap_ragged.py
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from bench.report import Figure, Ratio, Report, argument_parser, finish
from examples.demo_model import build_tokenizer
from grpo import GRPOConfig, GRPOTrainer
from grpo.record.progress import ProgressOnScreen

WARM_UP_STEPS = 3  # of a segment: the first batch is sampled while nobody trains, and all that is new is slow
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "completions": 32,
        "micro_batch": 32,
        "completion_tokens": 64,
    },
    "cuda": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "completions": 128,
        "micro_batch": 16,  # of all 128 at once autograd would keep 213 GiB
        "completion_tokens": 512,
    },
}
PROMPT_TOKENS = 64  # at most
VOCAB_SIZE = 512


class StepEnds(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_s = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_s.append(time.perf_counter())


def model_config(tokenizer: Any, *, hidden_size: int, num_hidden_layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def save_model(folder: Path, **sizes: int) -> int:
    """A Qwen3 of random weights with the demo's tokenizer. Returns its number of parameters."""
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(model_config(tokenizer, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def build_trainer(
    model: Path, output_dir: Path, args: argparse.Namespace, shape: dict[str, Any], lookahead: int = 0
) -> GRPOTrainer:
    on_cpu = args.device == "cpu"
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=str(output_dir),
            use_cpu=on_cpu,
            bf16=not on_cpu,
            max_steps=args.steps,
            per_device_train_batch_size=shape["micro_batch"],
            gradient_accumulation_steps=shape["completions"] // shape["micro_batch"],
            num_generations=8,
            max_completion_length=shape["completion_tokens"],
            vllm_max_model_length=shape["completion_tokens"] + PROMPT_TOKENS,
            generation_kwargs=shape.get("generation_kwargs", {"ignore_eos": True}),
            generation_lookahead=lookahead,
            vllm_engine_kwargs={"enforce_eager": True} if args.short else None,  # an engine that is ready soon
            vllm_importance_sampling_mode="token_truncate",
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10, 60) for b in range(10, 60)]}),
    )
    trainer.remove_callback(ProgressOnScreen)
    return trainer


@contextlib.contextmanager
def cores_apart(device: str) -> Iterator[Callable[[], None]]:
    """Without GPUs: an engine that starts now keeps all cores but the first, with as many threads; this process has the
    first one from the call of what this gives."""
    cores = sorted(os.sched_getaffinity(0))
    if device != "cpu":
        yield lambda: None
        return
    if len(cores) == 1:
        raise SystemExit("one core alone: there is nothing that engine and trainer could do at the same time")
    # Not moved later: two threads of an engine on one core wait for each other where the work is not even.
    os.sched_setaffinity(0, cores[1:])
    try:
        yield lambda: _move({*cores[:1]})
    finally:
        _move({*cores})


def _move(cores: set[int]) -> None:
    """All threads of this process."""
    torch.set_num_threads(len(cores))
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), cores)


@contextlib.contextmanager
def ready(args: argparse.Namespace, shape: dict[str, Any], lookahead: int) -> Iterator[tuple[GRPOTrainer, StepEnds]]:
    """A trainer whose engine is ready and warm, each on cores of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-overlap-") as folder, cores_apart(args.device) as take_own:
        torch.manual_seed(0)  # how probable a completion's end is depends on the weights
        save_model(Path(folder) / "model", **{name: shape[name] for name in ("hidden_size", "num_hidden_layers")})
        trainer = build_trainer(Path(folder) / "model", Path(folder) / "run", args, shape, lookahead)
        ends = StepEnds()
        trainer.add_callback(ends)
        try:
            assert trainer._local is not None
            trainer._local.sync_weights()  # waits for the engine, too
            take_own()
            yield trainer, ends
        finally:
            trainer.close()


def segment(args: argparse.Namespace, lookahead: int) -> dict[str, float]:
    """Train some steps; medians over all but the first and the last: seconds a step, and its parts."""
    with ready(args, SHAPES[args.device], lookahead) as (trainer, ends):
        trainer.train()
        lines = [line for line in trainer.state.log_history if "rollout/wait_s" in line][WARM_UP_STEPS:-1]
        assert trainer.model is not None
        num_parameters = trainer.model.num_parameters()
    steps_s = [after - before for before, after in zip(ends.at_s, ends.at_s[1:], strict=False)][WARM_UP_STEPS - 1 : -1]
    assert len(steps_s) == len(lines), (len(steps_s), len(lines))
    parts = {
        name: statistics.median(line[name] for line in lines)
        for name in (
            "rollout/wait_s",
            "rollout/generate_s",
            "weight_sync/total_s",
            "engine/idle_share",
            "rollout/policy_lag",
        )
    }
    assert parts["rollout/policy_lag"] == lookahead
    return {"step_s": statistics.median(steps_s), "parameters": num_parameters, **parts}


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of a segment")
    parser.add_argument("--ragged", action="store_true", help="completions end by chance")
    if "--ragged" in sys.argv:
        from bench import overlap_ragged

        overlap_ragged.add_arguments(parser)
        parser.set_defaults(steps=24, repetitions=3)
        return overlap_ragged.compare(parser.parse_args())
    args = parser.parse_args()
    if args.short:
        args.steps, args.repetitions = 5, 1
    on_policy: list[dict[str, float]] = []
    ahead: list[dict[str, float]] = []
    for _ in range(args.repetitions):
        on_policy.append(segment(args, 0))
        ahead.append(segment(args, 1))

    bounds_s = []
    for parts in on_policy:
        rest_s = parts["step_s"] - parts["rollout/wait_s"] - parts["weight_sync/total_s"]
        bounds_s.append(max(parts["rollout/wait_s"], rest_s) + parts["weight_sync/total_s"])

    def figure(name: str, unit: str, segments: list[dict[str, float]], key: str) -> Figure:
        return Figure(name=name, unit=unit, values=tuple(parts[key] for parts in segments))

    speed_ups = [before["step_s"] / after["step_s"] for before, after in zip(on_policy, ahead, strict=True)]
    achieved = [bound_s / after["step_s"] for bound_s, after in zip(bounds_s, ahead, strict=True)]
    possible = [before["step_s"] / bound_s for before, bound_s in zip(on_policy, bounds_s, strict=True)]
    report = Report(
        benchmark="overlap",
        settings={"parameters": on_policy[0]["parameters"], "steps a segment": args.steps, **SHAPES[args.device]},
        ratios=(
            Ratio(name="steps/s, lookahead 1 / lookahead 0", values=tuple(speed_ups)),
            Ratio(name="the same, at the bound", values=tuple(possible)),
            Ratio(name="bound of a step / step with lookahead 1", values=tuple(achieved), goal=0.9),
        ),
        figures=(
            figure("step, lookahead 0", "s", on_policy, "step_s"),
            figure("  waiting for completions", "s", on_policy, "rollout/wait_s"),
            figure("  weight sync", "s", on_policy, "weight_sync/total_s"),
            figure("  share in which the engine is idle", "", on_policy, "engine/idle_share"),
            figure("step, lookahead 1", "s", ahead, "step_s"),
            figure("  waiting for completions", "s", ahead, "rollout/wait_s"),
            figure("  generation, beside training", "s", ahead, "rollout/generate_s"),
            figure("  weight sync", "s", ahead, "weight_sync/total_s"),
            figure("  share in which the engine is idle", "", ahead, "engine/idle_share"),
            figure("  policy lag", "syncs", ahead, "rollout/policy_lag"),
        ),
        notes=(
            "without GPUs the training process is pinned to one core, the engine to the others",
            "bound: max(wait, rest) + weight sync of the on-policy steps, in which engine and ranks take turns",
        ),
    )
    finish(report, args)


if __name__ == "__main__":
    main()
