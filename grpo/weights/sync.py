"""One weight sync: every rank gathers the buckets, each local main sends them to its node's engines meanwhile."""

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import torch

from grpo.engine.client import EngineError
from grpo.engine.like import EngineLike
from grpo.place.timeouts import USUAL, Timeouts
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import SYNC_GATHER, SYNC_SEND
from grpo.weights.nccl import NcclTransport
from grpo.weights.node_engines import NodeEngines
from grpo.weights.page_sums import fetched, page_sum
from grpo.weights.report import WeightSyncReport
from grpo.weights.sender import Sender, Transport
from grpo.weights.sent_adapters import SentAdapter, SentAdapters
from grpo.weights.shm import ShmTransport

if TYPE_CHECKING:
    from grpo.weights.source import (  # needs transformers; a weight sync takes any that is like it
        GatheredSource,
        WeightSyncPlan,
    )

_log = logging.getLogger(__name__)

TRANSPORTS: dict[str, Callable[..., Transport]] = {"nccl": NcclTransport, "shm": ShmTransport}

_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def load_transport(backend: str) -> None:
    """Import vLLM's parts for this backend: takes seconds, hidden by the start of the engines.

    This process trains, and must keep its kernels like ranks that do not import vLLM: vLLM's platform disables cuDNN's
    attention for its whole process, and makes inductor compile in one thread (0.31).
    """
    if backend != "nccl":
        return
    has_cudnn, threads = torch.backends.cuda.cudnn_sdp_enabled(), os.environ.get(_COMPILE_THREADS)
    try:
        importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
        _ = importlib.import_module("vllm.platforms").current_platform  # resolved on access
    finally:
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        if threads is None:
            os.environ.pop(_COMPILE_THREADS, None)
        else:
            os.environ[_COMPILE_THREADS] = threads


@dataclass(eq=False)
class WeightSyncer:
    """Sends the trainer's weights to this node's engines.

    Collective: every rank of the job makes one, connects it and calls `sync`, in the same order.

    Memory beside the model during a weight sync, for any model: on a local main `NUM_BUFFERS` packed buckets and one
    being gathered, or two if it has experts that an engine loads one by one; on the other ranks a shard of a bucket,
    and over NCCL a bucket. A bucket is at least as large as the largest parameter.
    """

    source: "GatheredSource"
    clients: Sequence[EngineLike]
    """Current engines of the node on its local main; empty on every other rank."""
    _: KW_ONLY
    backend: str
    tensor_parallel_size: int
    timeout_s: float
    """Deadline of one call to an engine."""
    on_trouble: Callable[[EngineError], None] = lambda error: None
    """Called from any thread when the main thread may be stuck in NCCL init, which has no timeout: an engine refused or
    died while the weight sync group was opening, or a broadcast did not start."""
    timeline: Recorder = field(default_factory=Recorder)
    """Timeline for both halves of a weight sync."""
    in_flight: bool = False
    """Weight syncs run during generation. The engines are paused for them and continue with their KV; prefix caches
    stay, so every prompt needs a salt that changes with the weights."""
    on_paused: Callable[[int, list[dict[int, int]]], None] = lambda version, of_engines: None
    """Called before each weight sync during generation, from another thread while the engines are paused, with its
    version and the result of `NodeEngines.pause`."""
    adapters_in_use: Callable[[], Collection[int]] = lambda: ()
    """Returns the numbers of adapters in use by completions, waiting ones included, on the local main; called from
    another thread. If adapters are sent alone during generation, each completion keeps the adapter it began with: the
    engines are not paused for a weight sync of adapters only, and keep those in use."""
    timeouts: Timeouts = USUAL

    def __post_init__(self) -> None:
        self._pauses = False  # in this weight sync
        self._paused_at = 0.0
        self._paused_s: float | None = None
        self._num_adapters = 0
        self._sent_adapters = SentAdapters()
        self._must_send_older = False  # an engine may have been restarted since adapters were sent
        self._transport: Transport | None = None  # None on other ranks, before `connect` and after `close`

    def connect(self) -> None:
        """Open this node's weight sync group, which may take minutes over NCCL; not collective over ranks.

        Called again after an engine of the node was replaced, with a new group for all. No engine may run a step
        meanwhile, see `at_rest`.

        Raises:
            EngineError: an engine refused, on the local main.
        """
        if not self.clients:
            return
        self.close()
        self._engines = self._node_engines()
        self._transport = TRANSPORTS[self.backend](
            buffer_bytes=self.source.buffer_bytes, num_workers=len(self.clients) * self.tensor_parallel_size
        )
        self._engines.on_failure = self._transport.abort
        self._transport.open(self._engines, self.on_trouble)
        self._must_send_older = self.keeps_adapters

    @property
    def keeps_adapters(self) -> bool:
        """True if the engines hold an adapter for each weight sync with unfinished completions."""
        return self.in_flight and self.source.has_adapters

    @property
    def adapter_number(self) -> int | None:
        """Number of the newest adapter in this node's engines, on its local main; None if they hold one at most."""
        return self._num_adapters if self.keeps_adapters and self._num_adapters else None

    def _node_engines(self) -> NodeEngines:
        return NodeEngines(self.clients, tensor_parallel_size=self.tensor_parallel_size, timeout_s=self.timeout_s)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Pause this node's engines in a `with` block, if they may be generating; for calls other than a weight sync.

        Opening a weight sync group, or asking a worker for destinations, blocks the workers of an engine and rebuilds
        its layers. After an error they stay paused, as after `sync`.

        Raises:
            EngineError: an engine did not pause, or did not resume.
        """
        engines = self._node_engines() if self.in_flight and self.clients else None
        if engines is not None:
            engines.pause()
        yield
        if engines is not None:
            engines.resume()

    def abort(self) -> None:
        """Abort the weight sync group, from any thread and at any time; the next `connect` opens another one."""
        if (transport := self._transport) is not None:
            transport.abort()

    @property
    def packs_on_gpu(self) -> bool:
        """True if buckets are packed on a GPU, where checksums are almost free; on the local main."""
        return self._transport is not None and self._transport.device == "cuda"

    def sync(self, version: int, *, checks_bits: bool = False) -> tuple[WeightSyncReport, EngineError | None]:
        """Send the current weights to the engines. Collective over the trainer's world group under ZeRO-3.

        If an engine of this node or the connection to it fails, the gathers still run to the end, so that no other rank
        hangs, and the error is returned for the caller to share. After an error the node's engines are useless: they
        hold parts of two policies, and paused ones stay paused. The caller ends them.

        Args:
            version: the optimizer step of the weights; the engines' policy version afterwards.
            checks_bits: compare checksums of sent and received bits.
        """
        begun = time.monotonic()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # whichever stream wrote the weights last
        self.source.meet(receives=bool(self.clients))
        plan = self.source.plan()
        _log.debug("sends policy version %d: %d bytes", version, plan.num_bytes)
        self._pauses = self.in_flight and not (self.keeps_adapters and plan.is_adapters)
        self._paused_s = None
        self._sent_adapters.begin()
        sums: dict[str, torch.Tensor] = {}
        sender = None if self._transport is None else self._sender(version, plan, sums_bits=checks_bits)
        gather_s = 0.0
        try:
            for bucket in plan.buckets:
                places = None if sender is None else sender.places(bucket)
                gather_begun = time.perf_counter()
                self.source.fill(bucket, places)
                gather_s += time.perf_counter() - gather_begun
                if sender is not None and places is not None:
                    sender.send(bucket)
                    # During the sending; nothing fills its places before the next `places`.
                    if self.keeps_adapters:
                        self._sent_adapters.note(bucket, places)
                    if checks_bits:
                        sums |= {meta.name: page_sum(place) for meta, place in zip(bucket.metas, places, strict=True)}
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()  # training may write to the weights again
            gathered = time.monotonic()
            sent = fetched(sums)
            error = None if sender is None else sender.finish(lambda: self._finish(version, sent))
        except BaseException as broken:  # an interrupted notebook cell, too
            if sender is not None:
                sender.abandon(broken)
            raise
        finally:
            self.source.end_sync()
            if self._transport is not None:
                self._transport.end()
        self.timeline.add(SYNC_GATHER, begun, gathered, "sync")
        if sender is not None:
            self.timeline.add(SYNC_SEND, begun, time.monotonic(), "weight sync: send", bytes=plan.num_bytes)
        if error is None:
            self.source.mark_sent()
            error = self._send_older(version)
        report = WeightSyncReport(
            total_s=time.monotonic() - begun,
            gather_s=gather_s,
            send_s=0.0 if sender is None else sender.send_s,
            num_bytes=0 if sender is None else plan.num_bytes,
            paused_s=self._paused_s,
        )
        return report, error

    def _sender(self, version: int, plan: "WeightSyncPlan", *, sums_bits: bool) -> Sender:
        assert self._transport is not None
        return Sender(
            self._transport,
            self._engines,
            plan.buckets,
            held=plan.held,
            sums_bits=sums_bits,
            timeout_s=self.timeout_s,
            on_stuck=self.on_trouble,
            pause=(lambda: self._pause(version)) if self._pauses else None,
            timeouts=self.timeouts,
        )

    def _pause(self, version: int) -> None:
        self._paused_at = time.monotonic()
        of_engines = self._engines.pause()
        if not self.keeps_adapters:  # else unfinished completions keep their weights
            self.on_paused(version, of_engines)

    def _finish(self, version: int, sent: dict[str, int]) -> None:
        if self.keeps_adapters:
            self._engines.end_weight_update(str(version))
        else:
            self._engines.finish_weight_update(str(version))
        if sent:  # all layers are loaded only now
            self._engines.check_bits(sent)
        if self.source.has_adapters:
            self._num_adapters += 1
            in_use = self.adapters_in_use() if self.keeps_adapters else ()
            self._engines.take_adapter(self._num_adapters, str(version), in_use)
            self._sent_adapters.keep(self._num_adapters, version, in_use)
        if self._pauses:
            self._engines.resume()
            self._paused_s = time.monotonic() - self._paused_at
        if self.in_flight:
            return
        for client in self.clients:
            # KV that `kv_offloading_size` has moved to host memory is dropped only if the connector is named too (vLLM
            # 0.31).
            if not client.call("reset_prefix_cache", self.timeout_s, reset_connector=True):
                raise client.error("did not drop its prefix cache after a weight sync: requests are still running")
            if self.source.takes_images:  # image features are cached under the images' hashes
                client.call("reset_encoder_cache", self.timeout_s)

    def _send_older(self, newest_version: int) -> EngineError | None:
        """Send older adapters to restarted engines, so that completions of dead engines are sampled again with theirs.
        Engines that hold them already ignore them. Not collective; returns the error, if any."""
        if not self._must_send_older or self._transport is None:
            return None
        for number, adapter in self._sent_adapters.older().items():
            try:
                error = self._send_again(number, adapter, newest_version)
            finally:
                self._transport.end()
            if error is not None:
                return error
        self._must_send_older = False
        return None

    def _send_again(self, number: int, adapter: SentAdapter, newest_version: int) -> EngineError | None:
        plan, sums = self.source.plan(), {name: page_sum(tensor) for name, tensor in adapter.tensors.items()}
        assert plan.is_adapters, "weights of the base are sent with each weight sync, beside adapters"
        self._pauses = False
        sender = self._sender(newest_version, plan, sums_bits=True)

        def complete() -> None:
            self._engines.end_weight_update(str(newest_version))
            self._engines.check_bits(fetched(sums))
            keep = {*self.adapters_in_use(), self._num_adapters}
            self._engines.take_adapter(number, str(adapter.policy_version), keep)

        try:
            for bucket in plan.buckets:
                if (places := sender.places(bucket)) is not None:
                    for meta, place in zip(bucket.metas, places, strict=True):
                        place.copy_(adapter.tensors[meta.name])
                    sender.send(bucket)
            return sender.finish(complete)
        except BaseException as broken:
            sender.abandon(broken)
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
