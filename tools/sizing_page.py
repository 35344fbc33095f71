"""How many GPUs a model takes, from `grpo plan` itself: `python -m tools.sizing_page` writes docs/sizing.md.

The models' sizes are in tools/models/, each as a config.json, without weights.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo.ops.plan.command import add_arguments
from grpo.ops.plan.memory_budget import GIB
from grpo.ops.plan.plan import Plan
from grpo.ops.plan.planner import make_plan
from grpo.ops.plan.speed import SizeAdvice, length

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sizing.md"
MODELS = Path(__file__).with_name("models")
TENSOR_PARALLEL = {"Qwen2.5-1.5B": 1, "Qwen2.5-7B": 1, "Qwen3-30B-A3B": 2, "Qwen2.5-32B": 2, "Qwen2.5-72B": 4}
COMPLETION_TOKENS = (2048, 8192)
PROMPT_TOKENS = 1024
COMPLETIONS = 512
NODES = (1, 2, 4, 8, 16)
BATCHES = (8, 4, 2, 1)
GPU, GPUS_PER_NODE = "h100", 8
FOOT = """
Other models, lengths, GPUs and adapters: `grpo plan --model NAME --num_machines N --gpu h100`, as
[Plan and check a job](plan-and-doctor.md) shows. [Out of memory](out_of_memory.md) lists the remedies for each phase.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A layout on which a model fits."""

    model: str
    completion_tokens: int
    nodes: int
    reserve: int
    batch: int
    completions: int
    plan: Plan
    advice: SizeAdvice

    def cells(self) -> list[str]:
        estimates, advice = self.plan.estimates, self.advice
        assert estimates is not None
        deeper = advice.deeper
        return [
            self.model,
            f"{self.completion_tokens // 1024}k",
            f"{self.nodes} x {GPUS_PER_NODE}",
            str(self.reserve),
            str(TENSOR_PARALLEL[self.model]),
            str(self.batch),
            str(self.completions),
            f"{estimates.training.peak_bytes / GIB:.0f}",
            str(min(estimates.engine.sequences_at_once, estimates.engine.max_num_seqs)),
            f"{length(advice.generate_s)} + {length(advice.train_s)}",
            f"N = {deeper.lookahead}, reserve {deeper.reserve}: {length(deeper.step_s)}" if deeper else "",
        ]


HEAD = f"""# Which GPUs for which model

**Estimates, by the formulas of `grpo plan`: no GPU has measured any of them.** For each model and length of completions
you find the fewest nodes of {GPUS_PER_NODE} H100 on which it fits, and the settings with the shortest step there. Full
fine-tuning in bfloat16 with ZeRO-3, gradient checkpointing and flash attention, prompts of at most {PROMPT_TOKENS}
tokens, no reference model (`beta: 0`), about {COMPLETIONS} completions a step in groups of 8.

- *reserve*: `vllm_reserved_gpus`, the inference GPUs of each node; *TP*: `vllm_tensor_parallel_size`.
- *batch*: `per_device_train_batch_size`; *step*: `completions_per_step`, of all nodes.
- *GiB*: the peak of a training GPU; *at once*: completions of full length on an engine at a time.
- *seconds*: of sampling and then of training, with completions a quarter as long as they may be in the mean; *batches
  under way*: with [`generation_lookahead: N`](lookahead.md), if shorter by a twentieth.

This page is written by the code (`python -m tools.sizing_page`) from the `config.json` of each model in `tools/models`.

| model | answers | GPUs | reserve | TP | batch | step | GiB | at once | seconds | batches under way |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def planned(model: str, completion_tokens: int, nodes: int, reserve: int, batch: int) -> Size | None:
    """None where it does not fit, or where nothing can be said of seconds."""
    a_round = math.lcm((GPUS_PER_NODE - reserve) * nodes * batch, 8)
    completions = a_round * max(1, round(COMPLETIONS / a_round))
    flags = {
        "vllm_reserved_gpus": reserve,
        "vllm_tensor_parallel_size": TENSOR_PARALLEL[model],
        "per_device_train_batch_size": batch,
        "completions_per_step": completions,
        "num_generations": 8,
        "max_completion_length": completion_tokens,
        "vllm_max_model_length": PROMPT_TOKENS + completion_tokens,
        "attn_implementation": "flash_attention_2",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    where = ["--model", str(MODELS / model), "--num_machines", str(nodes), "--gpu", GPU]
    plan = make_plan(parser.parse_args([*where, "--prompt-tokens", str(PROMPT_TOKENS), "--", *words]))
    if plan.errors and plan.memory == "unknown":
        raise ValueError(f"{model} on {nodes} nodes, {flags}: {plan.errors}")
    if plan.memory != "fits" or not plan.works or plan.advice is None:
        return None
    return Size(
        model=model,
        completion_tokens=completion_tokens,
        nodes=nodes,
        reserve=reserve,
        batch=batch,
        completions=completions,
        plan=plan,
        advice=plan.advice,
    )


def smallest(model: str, completion_tokens: int) -> Size:
    """On the fewest nodes, the shortest step for each completion."""
    reserves = range(TENSOR_PARALLEL[model], GPUS_PER_NODE, TENSOR_PARALLEL[model])
    for nodes in NODES:
        sizes: list[Size] = []
        for reserve in reserves:
            by_batch = (planned(model, completion_tokens, nodes, reserve, batch) for batch in BATCHES)
            if (size := next(filter(None, by_batch), None)) is not None:
                sizes.append(size)
        if sizes:
            return min(sizes, key=lambda size: size.advice.step_s / size.completions)
    raise ValueError(f"{model} fits none of {NODES} nodes")


def rows() -> Iterator[list[str]]:
    for model in TENSOR_PARALLEL:
        for completion_tokens in COMPLETION_TOKENS:
            yield smallest(model, completion_tokens).cells()


def page() -> str:
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in rows()) + FOOT


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE} written")
