"""Dispatch: what a node's completions cost on their way to its ranks, and what its engines lose to an uneven batch.

The first part is dispatch alone: 8 ranks over gloo on this machine, 64 completions of 4,096 tokens for each. Engines
are replaced by completions that are ready. Everything else is as in training: prompts gathered, collapsed into
requests, answers put together, the nodes' status exchanged, completions packed, scattered, and turned into the lists
that TRL takes. Compared with TRL's own `VLLMGeneration.generate` in server mode (`gather_object`,
`broadcast_object_list`) whose server has answered already, and with a bare scatter of the same bytes.

The second part is two real engines with made-up weights, on a CPU each on a core of its own, and made-up lengths
(`max_tokens` for each completion, `ignore_eos`). One pool over both engines against static halves: the first half of
the prompts goes to the first engine, all at once.

    python -m bench.dispatch [--size small|tiny]
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines import VOCAB_SIZE, config, save_model, started
from bench.report import Figure, Ratio, Report, argument_parser, finish, interleave, ratio
from grpo.engine.client import EngineClient, EngineError
from grpo.engine.messages import Sample, Sampled
from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool

GOAL_S = 0.2
DEADLINE_S = 280.0
PROMPT_TOKENS = 32


def dispatch_seconds(folder: Path, *, ranks: int, completions: int, tokens: int, repetitions: int) -> dict[str, Any]:
    """Seconds by variant, of `bench.dispatch_ranks`."""
    settings, output = folder / "ranks.json", folder / "seconds.json"
    settings.write_text(
        json.dumps(
            {
                "ranks": ranks,
                "completions": completions,
                "tokens": tokens,
                "repetitions": repetitions,
                "output": str(output),
            }
        )
    )
    ran = subprocess.run(
        [sys.executable, "-m", "bench.dispatch_ranks", str(settings)],
        timeout=DEADLINE_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if ran.returncode:
        raise RuntimeError(f"the ranks ended with {ran.returncode}:\n{ran.stdout[-5000:]}")
    return json.loads(output.read_text())


class MadeUpLengths:
    """An engine that is given how long each completion is to be."""

    def __init__(self, client: EngineClient, lengths: Mapping[int, int]) -> None:
        self.name = client.name
        self._client = client
        self._lengths = lengths

    def submit(self, sample: Sample) -> None:
        for number, completion_id in enumerate(sample.ids):
            seed = sample.seed + number
            length = {"max_tokens": self._lengths[seed], "ignore_eos": True}
            one = range(completion_id, completion_id + 1)
            self._client.submit(replace(sample, ids=one, seed=seed, overrides=length))

    def abort(self, ids: Sequence[int]) -> None:
        self._client.abort(ids)

    def listen(self, on_answer: Callable[[Sampled | EngineError], None]) -> None:
        self._client.listen(on_answer)

    def error(self, what: str) -> EngineError:
        return self._client.error(what)


class TwoEngines:
    """Runs batches with made-up lengths on the same two engines, pooled or in halves."""

    def __init__(self, clients: Sequence[EngineClient], window: int, num_generations: int, long: int) -> None:
        self._clients = clients
        self._window = window
        self._num_generations = num_generations
        self._long = long
        self._seeds = itertools.count(0, 10**6)
        self._rng = np.random.default_rng(0)

    def seconds(self, lengths: Sequence[int], *, pooled: bool) -> float:
        """From the submission to the last completion.

        Args:
            lengths: tokens of each completion, by row.
        """
        first = next(self._seeds)
        n = self._num_generations
        prompts = self._rng.integers(2, VOCAB_SIZE, size=(len(lengths) // n, PROMPT_TOKENS)).astype(np.int32)
        requests = [Request(token_ids=prompt, n=n, seed=first + n * number) for number, prompt in enumerate(prompts)]
        of_seed = {first + row: int(length) for row, length in enumerate(lengths)}
        engines = [MadeUpLengths(client, of_seed) for client in self._clients]
        half = len(requests) // 2
        shares = [(engines, requests)]
        if not pooled:  # a pool of one engine sends it everything at once
            shares = [(engines[:1], requests[:half]), (engines[1:], requests[half:])]
        pools = [
            EnginePool(of_pool, max_num_seqs=[self._window] * len(of_pool), max_tokens=self._long)  # type: ignore[arg-type]
            for of_pool, _ in shares
        ]
        begun = time.perf_counter()
        batches = [pool.submit(share) for pool, (_, share) in zip(pools, shares, strict=True)]
        for pool, batch in zip(pools, batches, strict=True):
            completions = pool.collect(batch, DEADLINE_S)
            assert completions is not None
            assert len(completions.lengths) == len(batch.ids)
        seconds = time.perf_counter() - begun
        for pool in pools:
            pool.close()
        return seconds


def mixes(num_groups: int, n: int, *, long: int, short: int) -> Iterator[tuple[str, list[int]]]:
    """Name and lengths by row; groups are of one length, but in the last."""
    half = num_groups // 2
    yield "the long half first", [long] * (half * n) + [short] * (half * n)
    yield "long and short in turn", ([long] * n + [short] * n) * half
    yield "all equal", [(long + short) // 2] * (num_groups * n)
    drawn = np.random.default_rng(1).lognormal(np.log((long + short) / 4), 0.8, size=num_groups * n)
    yield "log-normal", np.clip(drawn, short, long).astype(int).tolist()


def measure_dispatch(options: Any, folder: Path) -> Report:
    sizes = {"ranks": 8, "completions": 64, "tokens": 4096}
    if options.short:
        sizes = {"ranks": 2, "completions": 8, "tokens": 64}
    seconds = dispatch_seconds(folder, repetitions=options.repetitions, **sizes)
    figures = {name: Figure(name=name, unit="s", values=tuple(values)) for name, values in seconds.items()}
    dispatch = figures["dispatch"]
    return Report(
        benchmark="dispatch",
        settings=sizes,
        ratios=(
            Ratio(name=f"{GOAL_S} s / dispatch", values=tuple(GOAL_S / value for value in dispatch.values), goal=1.0),
            ratio("TRL's lists / dispatch", figures["TRL's lists"], dispatch),
        ),
        figures=tuple(figures.values()),
        notes=(
            "Dispatch alone: real ranks over gloo on this machine, engines replaced by completions that are ready.",
        ),
    )


def measure_engines(options: Any, folder: Path) -> Report:
    window, num_groups, n, long, short = 8, 16, 4, 160, 16
    if options.short:
        window, num_groups, n, long, short = 4, 4, 4, 16, 4
    args = config(
        folder,
        options.device,
        max_completion_length=long,
        vllm_max_model_length=PROMPT_TOKENS + long,
        vllm_sync_backend="shm",
        vllm_gpu_memory_utilization=0.4,
        vllm_engine_kwargs={"enforce_eager": True, "max_num_seqs": window},
    )
    ratios, figures = [], []
    with started(args, save_model(folder / "model", options.size), 2) as (clients, windows):
        assert windows == [window, window], windows
        engines = TwoEngines(clients, window, n, long)
        for pooled in (True, False):
            engines.seconds([short] * (num_groups * n), pooled=pooled)  # warm
        for name, lengths in mixes(num_groups, n, long=long, short=short):
            seconds = interleave(
                {
                    "pool": partial(engines.seconds, lengths, pooled=True),
                    "halves": partial(engines.seconds, lengths, pooled=False),
                },
                options.repetitions,
            )
            pool, halves = (
                Figure(
                    name=f"{name}: {what}", unit="tokens/s", values=tuple(sum(lengths) / each for each in seconds[what])
                )
                for what in ("pool", "halves")
            )
            goal = {"the long half first": 1.5, "all equal": 0.95}.get(name)
            ratios.append(ratio(f"{name}: pool / static halves", pool, halves, goal))
            figures += [pool, halves]
    return Report(
        benchmark="dispatch",
        settings={"model": options.size, "window": window, "groups": f"{num_groups} of {n}", "lengths": (short, long)},
        ratios=tuple(ratios),
        figures=tuple(figures),
        notes=(f"Pool and halves: two real engines of {window} sequences at once, {num_groups * n} completions.",),
    )


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--size", choices=("small", "tiny"), default="tiny", help="of the engines' made-up model")
    parser.set_defaults(repetitions=3)
    options = parser.parse_args()
    if options.short:
        options.size, options.repetitions = "tiny", 1
    with tempfile.TemporaryDirectory(prefix="bench-dispatch-") as folder:
        parts = [measure_dispatch(options, Path(folder)), measure_engines(options, Path(folder))]
    finish(
        Report(
            benchmark="dispatch",
            settings={**parts[0].settings, **parts[1].settings},
            ratios=parts[0].ratios + parts[1].ratios,
            figures=parts[0].figures + parts[1].figures,
            notes=parts[0].notes + parts[1].notes,
        ),
        options,
    )


if __name__ == "__main__":
    main()
