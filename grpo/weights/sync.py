"""One weight sync: every rank goes through the buckets, each local main sends them to its node's engines meanwhile."""

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
    """Import what this backend takes of vLLM, seconds that cost nothing while the engines start.

    This process trains: it keeps its kernels, as the ranks that import no vLLM do. vLLM's platform turns cuDNN's
    attention off for all of its process, and has inductor compile in one thread (0.31).
    """
    if backend != "nccl":
        return
    has_cudnn, threads = torch.backends.cuda.cudnn_sdp_enabled(), os.environ.get(_COMPILE_THREADS)
    try:
        importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
        _ = importlib.import_module("vllm.platforms").current_platform  # which is looked for when it is asked for
    finally:
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        if threads is None:
            os.environ.pop(_COMPILE_THREADS, None)
        else:
            os.environ[_COMPILE_THREADS] = threads


@dataclass(eq=False)
class WeightSyncer:
    """Syncs the trainer's weights to this node's engines.

    Collective: every rank of the job makes one, connects it and calls `sync`, in the same order.

    Memory beside the model during a weight sync, for any model: on a local main `NUM_BUFFERS` packed buckets and one
    that is being put together, or two if it holds experts that an engine takes one by one; on the other ranks a shard
    of a bucket, and over NCCL a bucket. A bucket is as large as the largest parameter, where that is larger than the
    limit.
    """

    source: "GatheredSource"
    clients: Sequence[EngineLike]
    """The node's engines on its local main, the present ones at any time; none on every other rank."""
    _: KW_ONLY
    backend: str
    tensor_parallel_size: int
    timeout_s: float
    """Deadline of one call to an engine."""
    tell: Callable[[EngineError], None] = lambda error: None
    """Told at once, from any thread, of a failure that this rank may not get to raise, because a library holds its
    main thread: an engine's refusal to open the weight sync group, or its death there (NCCL comes back from a group
    that does not open when it likes, so that no new engine is waited for), a broadcast that does not begin."""
    timeline: Recorder = field(default_factory=Recorder)
    """Where both halves of a weight sync are recorded."""
    in_flight: bool = False
    """Whether completions are under way during a weight sync. The engines are paused for it and go on with the KV that
    they have; their prefix caches stay, so that every prompt needs a salt that changes with the weights."""
    on_paused: Callable[[int, list[dict[int, int]]], None] = lambda version, of_engines: None
    """Called before each weight sync in flight with its version and what `NodeEngines.pause` answers; from another
    thread, while the engines are paused."""
    adapters_in_use: Callable[[], Collection[int]] = lambda: ()
    """Numbers of the adapters of which completions are sampled, or wait for that, on the local main; from another
    thread. Where adapters travel by themselves and completions are under way, each ends with the adapter with which
    it began: the engines are not paused for a weight sync of adapters alone, and keep those in use."""
    timeouts: Timeouts = USUAL

    def __post_init__(self) -> None:
        self._pauses = False  # in this weight sync
        self._paused_at = 0.0
        self._paused_s: float | None = None
        self._num_adapters = 0
        self._sent_adapters = SentAdapters()
        self._must_send_older = False  # an engine may have come back since adapters were sent
        self._transport: Transport | None = None  # on other ranks, before `connect` and after `close`

    def connect(self) -> None:
        """Open the weight sync group of this node, which may take minutes over NCCL; not collective over ranks.

        Again when an engine of the node was replaced: then with a new group for all. No step of an engine may run
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
        self._transport.open(self._engines, self.tell)
        self._must_send_older = self.keeps_adapters

    @property
    def keeps_adapters(self) -> bool:
        """Whether the engines hold an adapter for each weight sync of which completions are under way."""
        return self.in_flight and self.source.has_adapters

    @property
    def adapter_number(self) -> int | None:
        """Of the newest adapter in this node's engines, on its local main; None where they hold one at most."""
        return self._num_adapters if self.keeps_adapters and self._num_adapters else None

    def _node_engines(self) -> NodeEngines:
        return NodeEngines(self.clients, tensor_parallel_size=self.tensor_parallel_size, timeout_s=self.timeout_s)

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Around other calls than a weight sync to this node's engines: synced to in flight, they are paused meanwhile.

        What opens a weight sync group, or asks a worker where weights go, holds the workers of an engine and takes its
        layers apart. After an error they stay paused, as after `sync`.

        Raises:
            EngineError: an engine did not pause, or did not go on.
        """
        engines = self._node_engines() if self.in_flight and self.clients else None
        if engines is not None:
            engines.pause()
        yield
        if engines is not None:
            engines.resume()

    def abort(self) -> None:
        """End the weight sync group, from any thread, whatever is under way; the next `connect` opens another one."""
        if (transport := self._transport) is not None:
            transport.abort()

    @property
    def packs_on_gpu(self) -> bool:
        """Whether buckets are packed on a GPU, where their sums cost next to nothing; on the local main."""
        return self._transport is not None and self._transport.device == "cuda"

    def sync(self, version: int, *, checks_bits: bool = False) -> tuple[WeightSyncReport, EngineError | None]:
        """Bring the engines to the current weights. Collective over the trainer's world group under ZeRO-3.

        When an engine of this node or the way to it fails, the buckets are gathered to the end all the same, so that no
        other rank hangs in a gather, and the error is handed back for the caller to share. The node's engines are of no
        use after an error: they hold parts of two policies, and those that were paused stay so. The caller ends them.

        Args:
            version: the optimizer step of the weights; the engines' policy version afterwards.
            checks_bits: whether sums of the bits that were sent and that arrived are compared.
        """
        begun = time.monotonic()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # whatever stream wrote the weights last
        self.source.meet(receives=bool(self.clients))
        plan = self.source.plan()
        _log.debug("weight syncs policy version %d: %d bytes", version, plan.num_bytes)
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
                    # While it is on its way; nothing fills its places before the next `places`.
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
            on_stuck=self.tell,
            pause=(lambda: self._pause(version)) if self._pauses else None,
            timeouts=self.timeouts,
        )

    def _pause(self, version: int) -> None:
        self._paused_at = time.monotonic()
        of_engines = self._engines.pause()
        if not self.keeps_adapters:  # else what is under way goes on with the weights that it has
            self.on_paused(version, of_engines)

    def _finish(self, version: int, sent: dict[str, int]) -> None:
        if self.keeps_adapters:
            self._engines.end_weight_update(str(version))
        else:
            self._engines.finish_weight_update(str(version))
        if sent:  # only now all layers are loaded
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
            # What `kv_offloading_size` has moved to host memory goes only if the connector is named too (vLLM 0.31).
            if not client.call("reset_prefix_cache", self.timeout_s, reset_connector=True):
                raise client.error("did not drop its prefix cache after a weight sync: requests are still running")
            if self.source.takes_images:  # what towers made of pictures is kept under the pictures' names
                client.call("reset_encoder_cache", self.timeout_s)

    def _send_older(self, newest_version: int) -> EngineError | None:
        """Bring engines that have come back the older adapters: completions of engines that died are sampled again with
        theirs. Those that hold them already leave them as they are. Not collective; returns what went wrong."""
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
        assert plan.is_adapters, "weights of the base travel with each weight sync, beside adapters"
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
