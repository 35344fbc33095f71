"""The ranks of `bench.dispatch`: a generation batch's way to the engines and back, with completions made beforehand.

`python -m bench.dispatch_ranks SETTINGS.json`: `ranks`, `completions` per rank, `tokens` of each, `repetitions`,
`output`. All ranks are of one node; the seconds of a variant are from the first rank's start to the last rank's end.
They are forks of one process, which has imported everything: what a launcher starts afresh takes minutes on two cores.
"""

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from accelerate import PartialState
from trl.generation.vllm_generation import VLLMGeneration
from vllm.utils.network_utils import get_open_port

from bench.report import interleave
from grpo.engine.messages import Sampled
from grpo.faults.sentinel_start import watch_for
from grpo.groups.agreement import agree_on_topology
from grpo.groups.node_groups import NodeGroups
from grpo.place.topology import read_topology
from grpo.rollout.ages import Age, Moment
from grpo.rollout.batch import Batch
from grpo.rollout.node import LocalMainSampler, NodeSampler
from grpo.rollout.packing import Completions, Request, SingleValues, to_lists
from grpo.rollout.prompts import Prompts

NUM_GENERATIONS = 8
PROMPT_TOKENS = 128
MAX_WAIT_S = 120.0


class ReadyPool:
    """In the place of `EnginePool`: the answers are there."""

    def __init__(self, answers: list[Sampled]) -> None:
        self._answers = answers

    def submit(self, requests: Sequence[Request], **_: Any) -> Batch:
        ids = range(sum(request.n for request in requests))
        now = time.monotonic()
        answers = dict(zip(ids, self._answers, strict=True))
        everything = dict.fromkeys(ids, 0)
        return Batch(
            ids=ids,
            name="the answers",
            submitted_at=now - 1.0,
            finished_at=now,
            answers=answers,
            engines=everything,
            ages=dict.fromkeys(ids, Age(first=Moment(), token_syncs=0)),
        )

    def collect(self, batch: Batch, timeout_s: float, check: Callable[[], None]) -> Completions:
        return batch.completions()

    accounts = SimpleNamespace(
        take_idle_s=lambda: 0.0, take_sampled=lambda: (0, 0.0), take_not_finite=lambda: (0, None)
    )

    def take_num_reissued(self) -> int:
        return 0


def trls_generation(rank: int, world_size: int, answers: list[Sampled]) -> VLLMGeneration:
    """TRL's generator in server mode, whose server has answered: lists, as they come out of its JSON."""
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.mode = "server"
    generation.accelerator = SimpleNamespace(
        is_main_process=rank == 0, process_index=rank, num_processes=world_size, device=torch.device("cpu")
    )
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length", "logprobs"):
        setattr(generation, name, 1)
    generation.structured_outputs_regex, generation.generation_kwargs = None, None
    if rank == 0:
        token_ids = [answer.token_ids.tolist() for answer in answers]
        output = {
            "prompt_ids": [[5] * PROMPT_TOKENS for _ in answers[::NUM_GENERATIONS]],
            "completion_ids": token_ids,
            "logprobs": [[[value] for value in answer.engine_logprobs.tolist()] for answer in answers],
            "logprob_token_ids": [[[token] for token in row] for row in token_ids],
        }
        generation.vllm_client = SimpleNamespace(generate=lambda **kwargs: output)
    return generation


def run_rank(rank: int, settings: dict[str, Any]) -> None:
    world_size = settings["ranks"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings["port"])}
    torch.set_num_threads(1)
    PartialState(cpu=True)  # the process group
    topology, pids = agree_on_topology(
        lambda: read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None),
        rank,
        world_size,
        timeout_s=MAX_WAIT_S,
    )
    watch = watch_for(topology, dict(enumerate(pids)))
    groups = NodeGroups(topology, max_wait_s=MAX_WAIT_S)
    rng = np.random.default_rng(0)
    num_rows, num_tokens = settings["completions"], settings["tokens"]
    answers = []
    if rank == 0:
        answers = [
            Sampled(
                completion_id=row,
                token_ids=rng.integers(0, 150_000, num_tokens).astype(np.int32),
                engine_logprobs=-rng.random(num_tokens).astype(np.float32),
            )
            for row in range(world_size * num_rows)
        ]
    sampler = NodeSampler(groups, watch)
    if rank == 0:
        sampler = LocalMainSampler(
            groups,
            watch,
            ReadyPool(answers),  # type: ignore[arg-type]
            timeout_s=MAX_WAIT_S,
        )
    prompts = [[5 + rank, row // NUM_GENERATIONS] * (PROMPT_TOKENS // 2) for row in range(num_rows)]
    theirs = trls_generation(rank, world_size, answers)
    raw = torch.empty(num_rows * (2 * num_tokens + 1), dtype=torch.int32)
    parts = [torch.zeros_like(raw) for _ in range(world_size)] if rank == 0 else None
    rows: dict[str, Any] = {}

    def ours() -> None:
        completions, _ = sampler.collect(sampler.submit(Prompts.of(prompts), 0))
        completion_ids, engine_logprobs = to_lists(completions)
        rows["ours"] = completion_ids, [SingleValues(row) for row in engine_logprobs]  # as `LocalVLLM.generate` does

    def trl() -> None:
        _, completion_ids, logprobs, _ = theirs.generate(prompts, None, NUM_GENERATIONS, contextlib.nullcontext())
        rows["trl"] = completion_ids, logprobs

    def scatter() -> None:
        dist.scatter(raw, parts)

    def timed(run: Callable[[], None]) -> Callable[[], float]:
        def seconds() -> float:
            gc.collect()
            dist.barrier()
            span = torch.tensor([time.monotonic(), 0.0], dtype=torch.float64)
            run()
            span[1] = -time.monotonic()
            dist.all_reduce(span, op=dist.ReduceOp.MIN)  # monotonic() is one clock for the whole machine
            return -float(span[1]) - float(span[0])

        return seconds

    variants = {"dispatch": timed(ours), "bare scatter": timed(scatter), "TRL's lists": timed(trl)}
    ours()
    seconds = interleave(variants, settings["repetitions"])
    (token_ids, logprobs), (their_ids, their_logprobs) = rows["ours"], rows["trl"]
    assert token_ids == their_ids
    assert [value for row in logprobs for (value,) in row] == [value for row in their_logprobs for (value,) in row]
    if rank == 0:
        Path(settings["output"]).write_text(json.dumps(seconds))
    dist.barrier()
    watch.stop()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    settings["port"] = get_open_port()
    multiprocessing.start_processes(run_rank, (settings,), nprocs=settings["ranks"], start_method="fork")


if __name__ == "__main__":
    main()
