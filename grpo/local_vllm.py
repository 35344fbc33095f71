"""What the trainer calls to generate and to push: `LocalVLLM` stands in TRL's seam, in place of `VLLMGeneration`."""

import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from grpo.config import GRPOConfig
from grpo.dispatch import (
    Completions,
    PackedRows,
    Request,
    assign,
    check_prompt_lengths,
    collapse,
    concat_rows,
    pack_rows,
    request_cost_tokens,
    seed_base,
    slice_completions,
    to_lists,
)
from grpo.engine.client import EngineClient, EngineError, engine_environment
from grpo.engine.messages import EngineSpec, Sample, Sampled
from grpo.engine_model import EngineModel, choose_backend, engine_args, sampling_settings
from grpo.failures import FailureRecord, FailureWatch, GenerationDropped, JobFailed
from grpo.node_groups import SIGNAL_PATIENCE_S, NodeGroups
from grpo.topology import NodeTopology
from grpo.weights.proof import MEAN_GAP_LIMITS, LogprobGap, gap_between, is_due, probe_prompts, trainer_logprobs
from grpo.weights.push import Pusher, PushReport
from grpo.weights.source import GatheredSource

POLL_S = 0.5  # how often a wait for completions looks for a failure elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport:
    """What one generation batch cost this node."""

    generate_s: float
    num_tokens: int
    """Completion tokens sampled on this node."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generate_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one push cost, over the whole job, and what its proof found."""

    total_s: float
    """Of the slowest rank, as the next two."""
    gather_s: float
    send_s: float
    num_bytes: int
    """Sent to each engine."""
    gap: LogprobGap | None
    """The worst engine's; None when this push was not proved."""
    policy_version: int


class LocalVLLM:
    """This node's engines, as the trainer sees them.

    `sync_weights` and `generate` are collective over the job. Engines start in the constructor and are
    waited for in the first `sync_weights`, so that their start-up overlaps the loading of the trainer's model.

    Args:
        progress: the current optimizer step, and "train" or "eval".
        attempt: of the run, for the names of the engines' logs.
    """

    def __init__(
        self,
        args: GRPOConfig,
        model: EngineModel,
        topology: NodeTopology,
        groups: NodeGroups,
        watch: FailureWatch,
        progress: Callable[[], tuple[int, str]],
        *,
        attempt: int = 0,
    ) -> None:
        self.args = args
        self.topology = topology
        self.backend = choose_backend(args.vllm_sync_backend, has_gpus=bool(topology.devices))
        self.last_generation: list[GenerationReport] = []
        """Of each node."""
        self.last_sync: SyncReport | None = None
        self.engine_startup_s: float | None = None
        self._model = model
        self._groups = groups
        self._watch = watch
        self._progress = progress
        self._attempt = attempt
        self._draws: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._pushes = 0
        self._pusher: Pusher | None = None
        self._trained_model: nn.Module | None = None
        self._autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self._probe: list[list[int]] = []
        self._max_model_len = 0
        self._next_request = 0
        self._started = time.monotonic()
        self._clients: list[EngineClient] | None = self._start_engines() if topology.is_local_main else None
        # At the interpreter's exit, or when nobody holds this object: a notebook's next trainer needs the GPUs.
        self._ender = weakref.finalize(self, _close_all, self._clients or [])

    # -- start ----------------------------------------------------------------------------------------------------

    def _start_engines(self) -> list[EngineClient]:
        spec = EngineSpec(
            engine_args=engine_args(self.args, self._model, self.topology, self.backend),
            sampling=sampling_settings(self.args),
        )
        node = self.topology.node

        watch = self._watch  # and not this object, which the engines' threads would keep alive

        def on_death(error: EngineError) -> None:
            if not watch.stop_was_asked(SIGNAL_PATIENCE_S):
                watch.report(watch.make_record(error))

        return [
            EngineClient(
                spec,
                name=f"engine {index} of node {node}",
                environment=engine_environment(
                    os.environ,
                    devices=devices,
                    tensor_parallel_size=self.topology.tensor_parallel_size,
                    engines_per_node=self.topology.num_engines,
                ),
                log_path=Path(self.args.output_dir) / "logs" / f"engine-node{node}-{index}.attempt-{self._attempt}.log",
                on_death=on_death,
            )
            for index, devices in enumerate(self.topology.engines)
        ]

    def attach(self, model: nn.Module, autocast: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Say which model is trained; before the first `sync_weights`.

        Args:
            model: the unwrapped transformers model.
            autocast: makes the context in which the trainer runs its forwards.
        """
        self._trained_model = model
        self._autocast = autocast

    def _connect(self) -> Pusher:
        assert self._trained_model is not None, "sync_weights before attach"
        failure, startup_s = None, 0.0
        with self._watch.during("engine start"):
            try:
                for client in self._clients or []:
                    left_s = self.args.vllm_start_timeout - (time.monotonic() - self._started)
                    ready = client.wait_ready(max(left_s, 0.1), self._watch.check)
                    startup_s = max(startup_s, ready.startup_s)
                    self._max_model_len = ready.max_model_len
            except EngineError as error:
                failure = self._watch.make_record(error)
            starts = self._groups.exchange(self._watch, failure, (startup_s, self._max_model_len))
        self.engine_startup_s = max(seconds for seconds, _ in starts)
        self._probe = probe_prompts(
            self._trained_model.get_input_embeddings().num_embeddings,
            min(length for _, length in starts if length),  # local mains know, the other ranks say 0
            self._model.special_ids,
        )
        bucket_bytes = self.args.vllm_sync_bucket_mb * 2**20
        pusher = Pusher(
            GatheredSource(self._trained_model, wire_dtype=self._model.dtype, bucket_bytes=bucket_bytes),
            self._clients,
            backend=self.backend,
            tensor_parallel_size=self.topology.tensor_parallel_size,
            bucket_bytes=bucket_bytes,
            timeout_s=self.args.vllm_sync_timeout,
        )
        with self._watch.during("push group"):
            failure = None
            timeout_s = self.args.vllm_sync_timeout
            stuck = self._watch.make_record(f"the push group did not open within {timeout_s:.0f} s (vllm_sync_timeout)")
            timer = threading.Timer(timeout_s, self._watch.report, [stuck])  # NCCL's own wait has no deadline
            timer.daemon = True
            timer.start()
            try:
                pusher.connect()
            except (EngineError, OSError, RuntimeError) as error:
                failure = self._watch.make_record(error)
            finally:
                timer.cancel()
            self._groups.exchange(self._watch, failure)
        return pusher

    # -- push -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Push the trainer's weights to all engines and prove it where that is due. Collective over the job.

        Raises:
            JobFailed: on every rank, when an engine failed on any node or a proof did not hold.
        """
        self._watch.check()
        if self._pusher is None:
            self._pusher = self._connect()
        step, _ = self._progress()
        with self._watch.during("push"):
            report, error = self._pusher.push(step)
            self._pushes += 1
            failure = None if error is None else self._watch.make_record(error)
            gap = None
            if is_due(self._pushes):
                gap, failure = self._prove(failure)
            try:
                answers = self._groups.exchange(self._watch, failure, (report, gap))
            except (JobFailed, GenerationDropped):
                self.close()  # the engines are of no use any more; and whatever waits for them ends
                raise
        self.last_sync = _summarise(answers, step)

    def _prove(self, failure: FailureRecord | None) -> tuple[LogprobGap | None, FailureRecord | None]:
        """Score the probe on both sides. Collective over the job: the trainer's forward gathers under ZeRO-3."""
        assert self._trained_model is not None
        expected = trainer_logprobs(
            self._trained_model,
            self._probe,
            self._autocast(),
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
        )
        if self._clients is None or failure is not None:
            return None, failure
        limit = self.args.vllm_max_logprob_gap or MEAN_GAP_LIMITS[self._model.dtype]
        worst = LogprobGap(mean=0.0, max=0.0)
        try:
            for client in self._clients:
                gap = gap_between(
                    client.call("prompt_logprobs", self.args.vllm_sync_timeout, prompts=self._probe), expected
                )
                worst = max(worst, gap, key=lambda g: g.mean)
                if gap.mean > limit:
                    raise client.error(
                        f"does not compute what the trainer does after push {self._pushes}: log-probabilities of the "
                        f"same tokens differ by {gap.mean:.3g} in the mean and {gap.max:.3g} at most, the limit of the "
                        f"mean is {limit:.3g} for {self._model.dtype} (vllm_max_logprob_gap)"
                    )
        except EngineError as error:
            return worst, self._watch.make_record(error)
        return worst, None

    # -- generation -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: contextlib.AbstractContextManager | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Sample one completion for each prompt of this rank. Collective over the job; data stays in the node.

        Args:
            prompts: token ids, with the copies of a prompt next to each other over the node's ranks.
            images: None; images are refused when the trainer is built.
            num_generations: not needed: equal neighbours show which prompts belong together.
            profiler: TRL's context around the generation.

        Returns:
            As TRL's `VLLMGeneration.generate`: prompt ids, completion ids, log-probabilities
            [completion][token][1] under the engine, and None in place of the ids behind them.
        """
        del num_generations
        if images is not None:
            raise ValueError("images reached the engine; local mode takes text alone")
        self._watch.check()
        with self._watch.during("generate"), profiler or contextlib.nullcontext():
            begun = time.perf_counter()
            parts, first_row = self._groups.gather_rows(pack_rows(prompts))
            failure, completions, cause = None, None, None
            if parts is not None:
                try:
                    completions = self._sample(parts)
                except (EngineError, ValueError) as error:
                    failure, cause = self._watch.make_record(error), error
            report = None
            if completions is not None:
                report = GenerationReport(generate_s=time.perf_counter() - begun, num_tokens=len(completions.token_ids))
            # Over all nodes, on gloo: a node that is done early waits here, and not in a collective of the training's
            # NCCL group, whose watchdog would shoot it. And the status goes before the data.
            try:
                reports = self._groups.exchange(self._watch, failure, report)
            except JobFailed as failed:
                raise failed from cause
            self.last_generation = [report for report in reports if report is not None]
            arrays = None
            if completions is not None:
                arrays = [completions.token_ids, completions.lengths, completions.engine_logprobs]
            token_ids, lengths, logprobs = self._groups.broadcast_arrays(arrays, [np.int32, np.int32, np.float32])
            of_node = Completions(token_ids=token_ids, lengths=lengths, engine_logprobs=logprobs)
            completion_ids, logprob_rows = to_lists(slice_completions(of_node, first_row, first_row + len(prompts)))
        return prompts, completion_ids, [[[value] for value in row] for row in logprob_rows], None

    def _sample(self, parts: Sequence[PackedRows]) -> Completions:
        """Completions of all rows of the node, in row order."""
        assert self._clients is not None
        max_tokens = self.args.max_completion_length
        first_row = 0
        for part in parts:
            check_prompt_lengths(part, max_model_len=self._max_model_len, max_tokens=max_tokens, first_row=first_row)
            first_row += part.num_rows
        step, mode = self._progress()
        draw = self._draws[step, mode]
        self._draws = defaultdict(int, {(step, mode): draw + 1})
        user_seed = (self.args.generation_kwargs or {}).get("seed")
        base = seed_base(seed=self.args.seed, step=step, mode=mode, draw=draw, user_seed=user_seed)
        requests = collapse(concat_rows(parts), base, self.topology.node)
        shares = assign([request_cost_tokens(r, max_tokens) for r in requests], len(self._clients))
        first_id = self._next_request
        self._next_request += len(requests)
        try:
            answers = self._ask(requests, shares, first_id)
        except BaseException:  # an interrupted notebook cell, too
            for client in self._clients:
                client.abort(range(first_id, self._next_request))
            raise
        in_order = [answers[first_id + index] for index in range(len(requests))]
        if not in_order:
            return Completions(
                token_ids=np.empty(0, np.int32), lengths=np.empty(0, np.int32), engine_logprobs=np.empty(0, np.float32)
            )
        return Completions(
            token_ids=np.concatenate([a.token_ids for a in in_order]),
            lengths=np.concatenate([a.lengths for a in in_order]),
            engine_logprobs=np.concatenate([a.engine_logprobs for a in in_order]),
        )

    def _ask(self, requests: list[Request], shares: list[list[int]], first_id: int) -> dict[int, Sampled]:
        """Send each engine its share, by index into `requests`; all answers, by request id."""
        assert self._clients is not None
        for client, share in zip(self._clients, shares, strict=True):
            client.submit(
                [
                    Sample(
                        request_id=first_id + index,
                        token_ids=requests[index].token_ids,
                        n=requests[index].n,
                        seed=requests[index].seed,
                    )
                    for index in share
                ]
            )
        return self._collect({id(c): len(s) for c, s in zip(self._clients, shares, strict=True)}, first_id)

    def _collect(self, outstanding: dict[int, int], first_id: int) -> dict[int, Sampled]:
        """Wait for all answers of all engines, watching for failures. By request id."""
        assert self._clients is not None
        deadline = time.monotonic() + self.args.vllm_generate_timeout
        answers: dict[int, Sampled] = {}
        while busy := [client for client in self._clients if outstanding[id(client)]]:
            self._watch.check()
            for client in busy:
                # One engine may be waited for; the others are only asked what they have by now.
                wait_s = min(POLL_S, deadline - time.monotonic()) if client is busy[0] else 0.0
                while (answer := client.next_sampled(wait_s)) is not None:
                    if answer.request_id < first_id:
                        continue  # of a batch that was interrupted
                    answers[answer.request_id] = answer
                    outstanding[id(client)] -= 1
                    if not outstanding[id(client)]:
                        break
            if time.monotonic() > deadline and any(outstanding.values()):
                late = next(client for client in self._clients if outstanding[id(client)])
                raise late.error(
                    f"has not answered {outstanding[id(late)]} requests after {self.args.vllm_generate_timeout:.0f} s "
                    "(vllm_generate_timeout)"
                )
        return answers

    def close(self) -> None:
        """End this node's engines. Safe to call twice."""
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None
        self._ender()


def _close_all(clients: list[EngineClient]) -> None:
    for client in clients:
        client.close()


def _summarise(answers: list[tuple[PushReport, LogprobGap | None]], step: int) -> SyncReport:
    reports = [report for report, _ in answers]
    gaps = [gap for _, gap in answers if gap is not None]
    worst = LogprobGap(mean=max(g.mean for g in gaps), max=max(g.max for g in gaps)) if gaps else None
    return SyncReport(
        total_s=max(r.total_s for r in reports),
        gather_s=max(r.gather_s for r in reports),
        send_s=max(r.send_s for r in reports if r.num_bytes),
        num_bytes=max(r.num_bytes for r in reports),
        gap=worst,
        policy_version=step,
    )
