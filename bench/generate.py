"""Generation through `LocalVLLM` against a bare vLLM and against transformers, on one machine in one run.

One node of one process, one engine. The bare one is `LLM.generate` in a process of its own with the same weights,
engine arguments, environment, prompts, sampling settings and seeds; both engines are up all the time, and one of them
works at a time, once the processes of the other one have stopped looking for messages. Every completion has the same
length: `ignore_eos`. On a CPU both run eagerly: two compilations would take most of the benchmark's time.

`LLM.generate` without seeds is what a seed for each completion costs inside vLLM. Transformers samples as TRL's trainer
does without vLLM, in this process, and only the first sixteenth of the tokens: its tokens/s hardly depend on it.

    python -m bench.generate [--size small|tiny]
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.engines import START_S, VOCAB_SIZE, config, engine_model, save_model, topology_of
from bench.report import Figure, Report, argument_parser, finish, interleave, ratio
from grpo import GRPOConfig
from grpo.config.models import AdapterSlot, engine_args, sampling_settings
from grpo.engine.environment import engine_environment
from grpo.engine.lifetime import end_session
from grpo.engine.plugin import HOST_MARK
from grpo.engine.supervisor import EngineSupervisor
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.local_vllm import LocalVLLM
from grpo.place.topology import NodeTopology
from grpo.rollout.packing import seed_base
from grpo.rollout.prompts import Prompts, collapse
from grpo.serving import engine_spec
from grpo.weights.adapters import Lora
from grpo.weights.trained import TrainedModel

PROMPT_TOKENS = 32
NUM_GENERATIONS = 8
STEP = 1
QUIET_S = 1.5  # vLLM's processes look for messages without a pause for a second after the last one (0.31)


class BareVLLM:
    """`bench.bare_vllm`, its process."""

    def __init__(self, settings: dict[str, Any], env: dict[str, str], folder: Path) -> None:
        file = folder / "bare.json"
        file.write_text(json.dumps(settings))
        self._private_folder = folder / f"bare-{os.getpid()}"  # where vLLM's sockets are
        self._private_folder.mkdir()
        self._log = folder / "bare.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.bare_vllm", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**env, "TMPDIR": str(self._private_folder), HOST_MARK: str(self._private_folder)},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        self._read()

    def generate(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the bare vLLM ended:\n{self._log.read_text()[-5000:]}")
        return json.loads(line)

    def close(self) -> None:
        end_session(self._process.pid, self._private_folder)
        self._process.wait()


@contextlib.contextmanager
def local_vllm(
    args: GRPOConfig,
    model: Path,
    topology: NodeTopology,
    trained: torch.nn.Module,
    *,
    lora: Lora | None = None,
    slot: AdapterSlot | None = None,
) -> Iterator[LocalVLLM]:
    watch = FailureWatch(None, node=0, rank=0, host="here")
    engines = EngineSupervisor(
        engine_spec(args, engine_model(model), topology, slot),
        topology,
        watch,
        log_folder=Path(args.output_dir) / "logs",
        attempt=0,
        timeout_s=START_S,
        max_restarts=args.vllm_max_restarts,
        standby=args.vllm_standby,
    )
    local = LocalVLLM(
        args,
        engines,
        TrainedModel(model=trained, engine_model=engine_model(model), end_tokens=(), lora=lora),
        NodeGroups(topology, max_wait_s=START_S),
        watch,
        lambda: (STEP, "train", STEP),
    )
    try:
        yield local
    finally:
        local.close()


def transformers_seconds(model: Any, prompts: list[list[int]], max_tokens: int) -> float:
    """As `GRPOTrainer._generate_single_turn` of TRL without vLLM; prompts have one length and need no padding."""
    settings = GenerationConfig(
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        disable_compile=True,
    )
    begun = time.perf_counter()
    with torch.no_grad():
        input_ids = torch.tensor(prompts, device=model.device)
        model.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings)
    return time.perf_counter() - begun


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="of the made-up model")
    parser.add_argument("--prompts", type=int, default=8, help=f"of which each is sampled {NUM_GENERATIONS} times")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    options = parser.parse_args()
    if options.short:
        options.size, options.prompts, options.tokens, options.repetitions = "tiny", 4, 8, 1
    with tempfile.TemporaryDirectory(prefix="bench-generate-") as folder:
        finish(measure(options, Path(folder)), options)


def measure(options: Any, folder: Path) -> Report:
    model = save_model(folder / "model", options.size, weights=True)
    args = config(
        folder,
        options.device,
        max_completion_length=options.tokens,
        vllm_max_model_length=PROMPT_TOKENS + options.tokens,
        vllm_sync_backend="shm",
        generation_kwargs={"ignore_eos": True},
        vllm_gpu_memory_utilization=0.4,  # one GPU may hold both engines
        vllm_engine_kwargs={"enforce_eager": True} if options.device == "cpu" else None,
    )
    topology = topology_of(options.device, 1)
    rng = np.random.default_rng(0)
    unique = rng.integers(2, VOCAB_SIZE, size=(options.prompts, PROMPT_TOKENS)).tolist()
    prompts = [prompt for prompt in unique for _ in range(NUM_GENERATIONS)]

    def base(draw: int) -> int:
        return seed_base(seed=args.seed, number=STEP, mode="train", draw=draw, user_seed=None)

    same_args = engine_args(args, engine_model(model), topology)
    del same_args["load_format"]
    requests = collapse(Prompts.of(prompts), base(1), 0)  # the second batch of a step
    bare = BareVLLM(
        {
            "engine_args": same_args,
            "sampling": sampling_settings(args),
            "n": NUM_GENERATIONS,
            "prompts": unique,
            "seeds": [request.seed for request in requests],
        },
        engine_environment(os.environ, devices=topology.engines[0], tensor_parallel_size=1, engines_per_node=1),
        folder,
    )
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    first_tokens = max(1, options.tokens // 16)
    try:
        bare.wait_ready()  # one after the other: two that start side by side on few cores take longer
        with local_vllm(args, model, topology, trained) as local:
            local.sync_weights()
            local.generate(prompts, None, NUM_GENERATIONS)  # warm
            ours = local.generate(prompts, None, NUM_GENERATIONS)[1]
            theirs = bare.generate("seeded")["completion_ids"]
            same = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
            trained.to(options.device)

            def generate() -> float:
                begun = time.perf_counter()
                local.generate(prompts, None, NUM_GENERATIONS)
                return time.perf_counter() - begun

            def rested(seconds_of: Callable[[], float]) -> float:
                time.sleep(QUIET_S)
                return seconds_of()

            variants: dict[str, Callable[[], float]] = {
                "LocalVLLM.generate": generate,
                "LLM.generate": lambda: bare.generate("seeded")["seconds"],
                "LLM.generate without seeds": lambda: bare.generate("unseeded")["seconds"],
                "transformers": lambda: transformers_seconds(trained, prompts, first_tokens),
            }
            seconds = interleave({name: partial(rested, run) for name, run in variants.items()}, options.repetitions)
    finally:
        bare.close()
    figures = {
        name: Figure(
            name=name,
            unit="tokens/s",
            values=tuple(
                len(prompts) * (first_tokens if name == "transformers" else options.tokens) / value for value in values
            ),
        )
        for name, values in seconds.items()
    }
    ours_figure = figures["LocalVLLM.generate"]
    return Report(
        benchmark="generate",
        settings={
            "model": options.size,
            "parameters": sum(parameter.numel() for parameter in trained.parameters()),
            "prompts": options.prompts,
            "samples of each": NUM_GENERATIONS,
            "tokens of each": options.tokens,
        },
        ratios=(
            ratio("LocalVLLM / LLM.generate, same seeds", ours_figure, figures["LLM.generate"], goal=0.95),
            ratio("LocalVLLM / LLM.generate without seeds", ours_figure, figures["LLM.generate without seeds"]),
            ratio("LocalVLLM / transformers", ours_figure, figures["transformers"]),
        ),
        figures=tuple(figures.values()),
        notes=(f"{same:.0%} of LocalVLLM's completions are, token for token, those of LLM.generate.",),
    )


if __name__ == "__main__":
    main()
