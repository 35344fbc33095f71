"""Sampling and scoring of evaluation sets by engines with a saved model, batch by batch as in the run.

The order of prompts, the seed of each completion and the rows of a reward function's call equal those of the run's
evaluation at the checkpoint's step, so that its figures are reproduced, up to rounding in other batches of the engines.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, GenerationConfig, TrainerState
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.trainer.utils import RepeatSampler, get_callable_name, is_async_callable

from grpo.config import GRPOConfig
from grpo.config.models import choose_backend, describe_model, engine_args, sampling_settings
from grpo.config.options import evaluation_sampling, passes_at
from grpo.engine.client import EngineClient, EngineDied
from grpo.engine.environment import engine_environment
from grpo.engine.messages import EngineSpec
from grpo.ops.evaluate.job import EvaluationJob
from grpo.place.devices import visible_devices
from grpo.place.launch import host_name, read_launch
from grpo.place.topology import NodeTopology
from grpo.preflight.data import prompt_tokens
from grpo.rewards.batch import Notes, Rows
from grpo.rewards.passes import Passes
from grpo.rollout.batch import Batch
from grpo.rollout.packing import REFUSED, seed_base, to_lists
from grpo.rollout.pool import EnginePool
from grpo.rollout.prompts import Prompts, collapse
from grpo.weights.engine_args import transfer_args


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """Result of one evaluation set."""

    name: str | None
    num_prompts: int
    num_completions: int
    num_refused: int
    """Refused completions; they count as wrong."""
    mean_length: float
    """Mean number of tokens of a completion."""
    clipped_ratio: float
    """Share of completions cut at the length limit."""
    seconds: float
    metrics: Mapping[str, float]
    """`pass@k` and `avg@n`, see `Passes.metrics`."""

    @property
    def title(self) -> str:
        return self.name or "eval"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EvaluatedPart:
    """A batch of the run's evaluation."""

    rows: list[dict[str, Any]]
    """Rows with each prompt repeated once per sample."""
    prompt_ids: list[list[int]]
    batch: Batch


def evaluate(job: EvaluationJob, *, num_engines: int | None, dtype: str | None, log: Path | None) -> list[SetResult]:
    """Evaluate the requested sets, in order.

    Args:
        num_engines: on this machine; None: as many as its GPUs allow, and one on CPUs.
        dtype: of the engines, by vLLM's name; None: the run's.
        log: file for the engines' output; None: beside the checkpoint.

    Raises:
        EngineError: an engine did not start, or died.
        ValueError: the checkpoint cannot be served, or a reward function returned something else.
    """
    args = job.arguments.training
    with ExitStack() as ends:
        model = _servable(job.checkpoint, ends)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        place = _place(args, num_engines)
        described, _ = describe_model(str(model), args, None, place)
        # without effect: no weight sync follows
        transfer = transfer_args(choose_backend("auto", has_gpus=bool(place.devices)))
        settings = engine_args(args, described, place) | transfer | {"load_format": "auto"}
        spec = EngineSpec(engine_args=settings | ({"dtype": dtype} if dtype else {}), sampling=sampling_settings(args))
        pool = _start(
            spec, place, args, log or job.checkpoint.parent / "logs" / "eval.log", _ends(model, tokenizer), ends
        )
        return _evaluate_sets(job, pool, tokenizer)


def _servable(checkpoint: Path, ends: ExitStack) -> Path:
    """Return a folder vLLM can load: the checkpoint itself, or an export of it."""
    if (checkpoint / "config.json").exists() and [*checkpoint.glob("model*.safetensors")]:
        return checkpoint
    folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix=".eval-", dir=checkpoint.parent)))
    merge = ["--merge"] if (checkpoint / "adapter_config.json").exists() else []
    command = [sys.executable, "-m", "grpo", "export", str(checkpoint), str(folder / "model"), *merge]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{checkpoint} holds no model that can be served: {done.stderr.strip()}")
    return folder / "model"


def _place(args: GRPOConfig, num_engines: int | None) -> NodeTopology:
    devices = () if args.use_cpu else visible_devices(os.environ)
    size = args.vllm_tensor_parallel_size
    fit = len(devices) // size if devices else 1
    count = num_engines or fit
    if devices and not 1 <= count <= fit:
        raise ValueError(
            f"{count or 1} engines of {size} GPUs each (vllm_tensor_parallel_size) do not fit the {len(devices)} "
            "visible ones: set --engines, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    engines = tuple(devices[index * size : (index + 1) * size] for index in range(count))
    return NodeTopology(
        **asdict(read_launch({})),
        host=host_name(os.environ),
        devices=devices,
        reserved_devices=devices,
        engines=engines,
        tensor_parallel_size=size,
    )


def _ends(model: Path, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of a completion, as in TRL (1.16)."""
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        found = None
    ids = [] if found is None else [found] if isinstance(found, int) else [*found]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ids]))


def _start(
    spec: EngineSpec, place: NodeTopology, args: GRPOConfig, log: Path, end_tokens: tuple[int, ...], ends: ExitStack
) -> EnginePool:
    clients = []
    for index, devices in enumerate(place.engines):
        environment = engine_environment(
            os.environ,
            devices=devices,
            tensor_parallel_size=place.tensor_parallel_size,
            engines_per_node=place.num_engines,
            dtype=spec.engine_args["dtype"],
        )
        client = EngineClient(spec, name=f"engine {index}", environment=environment, log_path=log)
        ends.callback(client.close)
        clients.append(client)
    ready = [client.wait_ready(args.vllm_start_timeout) for client in clients]
    pool = EnginePool(
        clients,
        max_num_seqs=[each.max_num_seqs for each in ready],
        max_tokens=args.max_completion_length,
        max_model_len=min(each.max_model_len for each in ready),
        end_tokens=end_tokens,
    )
    ends.callback(pool.close)
    return pool


def _evaluate_sets(job: EvaluationJob, pool: EnginePool, tokenizer: Any) -> list[SetResult]:
    results, draw = [], 0
    for name, rows in job.sets.items():
        parts = [*_batches(job, rows)]
        if name in job.asked:
            count = sum(map(len, parts))
            print(f"grpo eval: {name or job.checkpoint.name}: {count:,} completions ...", file=sys.stderr, flush=True)
            results.append(_evaluate_set(job, name, parts, draw, pool, tokenizer))
        draw += len(parts)
    return results


def _batches(job: EvaluationJob, rows: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield batches as dealt by TRL's sampler and accelerate (1.16, 1.15), without the padding of the last one."""
    args = job.arguments.training
    num_generations = args.num_generations_eval or args.num_generations
    order = [*RepeatSampler(rows, mini_repeat_count=num_generations, seed=args.seed)]
    size = job.ranks * args.per_device_eval_batch_size
    for begin in range(0, len(order), size):
        yield [rows[index] for index in order[begin : begin + size]]


def _evaluate_set(
    job: EvaluationJob, name: str | None, parts: list[list[dict[str, Any]]], draw: int, pool: EnginePool, tokenizer: Any
) -> SetResult:
    args, begun = job.arguments.training, time.monotonic()
    user_seed = (args.generation_kwargs or {}).get("seed")
    submitted = []
    for number, rows in enumerate(parts):
        base = seed_base(seed=args.seed, number=job.step, mode="eval", draw=draw + number, user_seed=user_seed)
        prompt_ids = [prompt_tokens(row["prompt"], tokenizer, args) for row in rows]
        requests = collapse(Prompts.of(prompt_ids), base, 0, evaluation_sampling(args, name))
        batch = pool.submit(requests, name=f"batch {number} of the set", order=number)
        submitted.append(_EvaluatedPart(rows=rows, prompt_ids=prompt_ids, batch=batch))
    weights = args.reward_weights or [1.0] * len(job.reward_funcs)
    passes = Passes(
        names=[get_callable_name(each) for each in job.reward_funcs],
        weights=np.array(weights, np.float64),
        num_generations=args.num_generations_eval or args.num_generations,
        at=passes_at(args),
        pass_reward=args.eval_pass_reward,
    )
    lengths, num_refused, num_clipped = list[int](), 0, 0
    longest = evaluation_sampling(args, name).get("max_tokens", args.max_completion_length)
    for part in submitted:
        part.batch.asked_at = time.monotonic()
        found = pool.collect(part.batch, args.vllm_generate_timeout)
        if found is None:
            raise EngineDied("all engines have died: --log says where they print")
        token_ids, _ = to_lists(found)
        refused = found.policy_versions == REFUSED
        num_refused += int(refused.sum())
        lengths += found.lengths.tolist()
        num_clipped += int((found.lengths >= longest).sum())
        passes.add(_scored(job, part, token_ids, refused.tolist(), tokenizer))
    return SetResult(
        name=name,
        num_prompts=len(lengths) // passes.num_generations,
        num_completions=len(lengths),
        num_refused=num_refused,
        mean_length=float(np.mean(lengths)),
        clipped_ratio=num_clipped / len(lengths),
        seconds=time.monotonic() - begun,
        metrics=passes.metrics(),
    )


def _scored(
    job: EvaluationJob, part: _EvaluatedPart, token_ids: Sequence[list[int]], refused: Sequence[bool], tokenizer: Any
) -> np.ndarray:
    """Score a batch, [rows, functions] float64, in calls with one rank's rows each; NaN: no reward."""
    size = job.arguments.training.per_device_eval_batch_size
    rewards = np.full((len(part.rows), len(job.reward_funcs)), np.nan)
    for begin in range(0, len(part.rows), size):
        kept = [row for row in range(begin, min(begin + size, len(part.rows))) if not refused[row]]
        if not kept:
            continue
        own, said = [part.rows[row] for row in kept], [token_ids[row] for row in kept]
        prompts = [row["prompt"] for row in own]
        given = Rows(own, prompts, None, TrainerState(global_step=job.step))
        given.completions[:] = _decoded(prompts, [part.prompt_ids[row] for row in kept], said, tokenizer)
        given.completion_ids[:] = said
        for number, func in enumerate(job.reward_funcs):
            returned = func(**given.of(range(len(own)), Notes()))
            values = [*(asyncio.run(returned) if is_async_callable(func) else returned)]
            if len(values) != len(own):
                name = get_callable_name(func)
                raise ValueError(f"reward function {name} returned {len(values)} rewards for {len(own)} completions")
            rewards[kept, number] = [np.nan if value is None else float(value) for value in values]
    return rewards


def _decoded(
    prompts: Sequence[Any], prompt_ids: Sequence[list[int]], token_ids: Sequence[list[int]], tokenizer: Any
) -> list[Any]:
    """Decode completions as TRL does for reward functions (1.16, `_generate`)."""
    if not is_conversational({"prompt": prompts[0]}):
        return tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        contents = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": content}] for content in contents]
    return [[parse_response(tokenizer, ids, prefix=own)] for ids, own in zip(token_ids, prompt_ids, strict=True)]
