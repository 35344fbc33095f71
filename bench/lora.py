"""What an adapter costs an engine that samples: `LocalVLLM` with one against without, in one run.

Two engines of the same model, up all the time, of which one works at a time: one samples from plain weights, the other
with a LoRA adapter of rank 16 on all linear layers, by vLLM's own LoRA layers. Every completion has the same length:
`ignore_eos`. On a CPU both run eagerly, as vLLM does with LoRA there (0.31). What a weight sync of adapters costs is in
`bench.weight_sync`.

    python -m bench.lora [--size small|tiny]
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bench.engines import VOCAB_SIZE, config, save_model, topology_of
from bench.generate import NUM_GENERATIONS, PROMPT_TOKENS, local_vllm
from bench.report import Figure, Report, argument_parser, finish, interleave, ratio
from grpo.local_vllm import LocalVLLM
from grpo.preflight.lora import choose_lora
from grpo.weights.adapters import Lora

RANK = 16


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="of the made-up model")
    parser.add_argument("--prompts", type=int, default=8, help=f"of which each is sampled {NUM_GENERATIONS} times")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    options = parser.parse_args()
    if options.short:
        options.size, options.prompts, options.tokens, options.repetitions = "tiny", 4, 8, 1
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as folder:
        finish(measure(options, Path(folder)), options)


def measure(options: Any, folder: Path) -> Report:
    model = save_model(folder / "model", options.size, weights=True)
    args, with_adapter = (
        config(
            folder / name,
            options.device,
            max_completion_length=options.tokens,
            vllm_max_model_length=PROMPT_TOKENS + options.tokens,
            vllm_sync_backend="shm",
            generation_kwargs={"ignore_eos": True},
            vllm_gpu_memory_utilization=0.4,  # one GPU may hold both engines
            vllm_engine_kwargs={"enforce_eager": True} if options.device == "cpu" else None,
        )
        for name in ("plain", "lora")
    )
    topology = topology_of(options.device, 1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    wrapped = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    choice = choose_lora(wrapped, None, None, with_adapter, has_gpus=options.device == "cuda")
    assert choice is not None
    lora = Lora(wrapped, merges=False)
    unique = np.random.default_rng(0).integers(2, VOCAB_SIZE, size=(options.prompts, PROMPT_TOKENS)).tolist()
    prompts = [prompt for prompt in unique for _ in range(NUM_GENERATIONS)]

    def seconds_of(local: LocalVLLM) -> float:
        begun = time.perf_counter()
        local.generate(prompts, None, NUM_GENERATIONS)
        return time.perf_counter() - begun

    with local_vllm(args, model, topology, plain) as without:
        without.sync_weights()  # one after the other: two that start side by side on few cores take longer
        with local_vllm(with_adapter, model, topology, lora.base, lora=lora, slot=choice.slot) as adapted:
            adapted.sync_weights()
            variants = {
                "with an adapter": partial(seconds_of, adapted),
                "without": partial(seconds_of, without),
            }
            for run in variants.values():
                run()  # warm
            seconds = interleave(variants, options.repetitions)
    tokens = len(prompts) * options.tokens
    figures = {
        name: Figure(name=name, unit="tokens/s", values=tuple(tokens / value for value in values))
        for name, values in seconds.items()
    }
    return Report(
        benchmark="lora",
        settings={
            "model": options.size,
            "parameters": sum(parameter.numel() for parameter in plain.parameters()),
            "of adapters": sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad),
            "rank": RANK,
            "prompts": options.prompts,
            "samples of each": NUM_GENERATIONS,
            "tokens of each": options.tokens,
        },
        ratios=(ratio("with an adapter / without", figures["with an adapter"], figures["without"]),),
        figures=tuple(figures.values()),
        notes=(),
    )


if __name__ == "__main__":
    main()
