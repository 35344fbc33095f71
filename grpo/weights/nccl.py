"""NCCL backend: one small communicator of the local main and its engines' workers.

Imports vLLM only when the group is opened: the rest runs, and is tested, with torch alone.
"""

import base64
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from grpo.engine.client import EngineError
from grpo.weights.buckets import NUM_BUFFERS, Bucket, ParamMeta, packed_bytes, packed_places

if TYPE_CHECKING:
    from grpo.weights.node_engines import NodeEngines

_NO_NCCL = "vLLM could not load NCCL in the trainer [GRPO-501]: set vllm_sync_backend to 'shm', or mend NCCL"
POLL_S = 0.0005
MAX_AHEAD_BYTES = 2**30  # of a bucket received while another is loaded: engines leave that much memory free
UNALIGNED = 1  # no gaps, as in vLLM's own packed transfers


class NcclTransport:
    """Packed buffers on this rank's GPU, broadcast to all workers of the node's engines.

    A bucket is filled on the current stream and broadcast on a separate stream, which waits for the first. The main
    thread queues both, bucket by bucket, so the order of operations on a communicator is the same everywhere. Except
    for this rank, the weight sync group shares no rank with an all-gather that could wait for it. A buffer is free
    again after its broadcast.

    Args:
        buffer_bytes: capacity for any bucket.
        num_workers: of all the node's engines.
    """

    device = "cuda"

    def __init__(self, *, buffer_bytes: int, num_workers: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffers: dict[int, torch.Tensor] = {}  # [bytes] uint8, by index, during a weight sync
        self._sent: dict[int, Any] = {}  # an event after its broadcast, by the same index
        self._stream = torch.cuda.Stream()
        self._num_workers = num_workers
        self._communicator: Any = None
        self._aborted = threading.Event()
        self._abort_lock = threading.Lock()

    def open(self, engines: "NodeEngines", on_refusal: Callable[[EngineError], None]) -> None:
        """Create the communicator with the workers.

        Args:
            on_refusal: called at once for a refusing engine; this rank may be stuck in NCCL init for minutes.

        Raises:
            EngineError: an engine refused.
            RuntimeError: vLLM could not load NCCL here, or the workers did not join.
        """
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer import nccl_common

        # vLLM's `current_stream()` makes a side stream current, permanently, unless it has seen a stream being set
        # since its import (0.31).
        torch.cuda.set_stream(torch.cuda.current_stream())
        try:
            unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        except (OSError, ValueError, AttributeError) as error:  # no library, a torch without one, an older one
            raise RuntimeError(_NO_NCCL) from error
        # The id is sent over the engines' sockets. vLLM's alternative is a store on a port, whose values workers
        # unpickle.
        info = nccl_common.NCCLWeightTransferInitInfo(
            nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
            rank_offset=1,
            world_size=1 + self._num_workers,
            packed=True,
        )
        # The workers wait for this rank inside the call, and this rank for them.
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            answer = pool.submit(engines.init_weight_transfer_engine, nccl_common.worker_init_payload(info))

            def report(done: Future[None]) -> None:
                if isinstance(error := done.exception(), EngineError):
                    on_refusal(error)

            answer.add_done_callback(report)
            try:
                self._communicator = nccl_common.uid_init_process_group(
                    unique_id, 0, info.world_size, torch.accelerator.current_device_index()
                )
            except Exception:  # failed workers do not join
                if answer.done():
                    answer.result()
                raise
            # VLLM_DISABLE_PYNCCL does this, and broadcasts then do nothing.
            if getattr(self._communicator, "disabled", False):
                raise RuntimeError(_NO_NCCL)
            answer.result()
        finally:
            pool.shutdown(wait=False)

    def begin(self) -> None:
        if self._aborted.is_set():
            raise EngineError("the weight sync group was ended by an earlier failure: it takes no more weights")

    def places(self, number: int, bucket: Bucket) -> list[torch.Tensor]:
        index = number % NUM_BUFFERS
        if index not in self._buffers:
            self._buffers[index] = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self.device)
        return packed_places(self._buffers[index], bucket.metas, UNALIGNED)

    def start_sending(self, number: int, bucket: Bucket) -> None:
        """Queue the broadcast, from the main thread, after the engines were informed: the first operation of a
        communicator blocks until the peers join, or until `abort`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        packed = self._buffers[number % NUM_BUFFERS][: packed_bytes(bucket.metas, UNALIGNED)]
        if self._aborted.is_set():  # right before the call: an abort frees the communicator
            return
        try:
            self._communicator.broadcast(packed, src=0, stream=self._stream)
        except RuntimeError as error:
            if not self._aborted.is_set():  # else an engine has failed, and its answer has the reason
                raise EngineError(f"the broadcast to the node's engines failed: {error}") from error
        self._sent[number % NUM_BUFFERS] = self._stream.record_event()

    def is_taken(self, number: int, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        sent = self._sent.get(number % NUM_BUFFERS)  # None: after an abort
        while not (taken := sent is None or sent.query()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return bool(taken)

    def end(self) -> None:
        # The memory returns to the current stream, which must not write to it before the last broadcast is over.
        torch.cuda.current_stream().wait_stream(self._stream)
        self._buffers.clear()
        self._sent.clear()

    def abort(self) -> None:
        """End every operation on the weight sync group, from any thread; the group cannot be used again."""
        with self._abort_lock:
            if not self._aborted.is_set():
                self._aborted.set()
                if self._communicator is not None:
                    self._communicator.destroy()

    def close(self) -> None:
        self.abort()
        self._communicator = None
        self._buffers.clear()


def receive(
    group: Any,
    buckets: Sequence[Sequence[ParamMeta]],
    load: Callable[[list[tuple[str, torch.Tensor]]], None],
    device: torch.device | str,
) -> None:
    """Receive buckets in a worker; each is received while the one before it is loaded.

    vLLM's own consumer (0.31) ends a buffer when it is full; here a buffer ends with its bucket. vLLM also loads on
    several streams in turn, which does not fit the layer-wise reload: it keeps partial layers across buffers.

    Args:
        group: vLLM's communicator.
        load: called with the tensors of each bucket, in order; views of memory that is not written again while
            referenced.
        device: of the received tensors.
    """
    loading, receiving = torch.cuda.current_stream(), torch.cuda.Stream()

    def start(metas: Sequence[ParamMeta]) -> tuple[torch.Tensor, Any]:
        packed = torch.empty(packed_bytes(metas, UNALIGNED), dtype=torch.uint8, device=device)
        receiving.wait_stream(loading)  # which may still be loading from this memory
        group.broadcast(packed, src=0, stream=receiving)
        return packed, receiving.record_event()

    def named(metas: Sequence[ParamMeta], packed: torch.Tensor, arrived: Any) -> list[tuple[str, torch.Tensor]]:
        loading.wait_event(arrived)
        return [(meta.name, place) for meta, place in zip(metas, packed_places(packed, metas, UNALIGNED), strict=True)]

    coming = [start(buckets[0])]
    for metas, following in zip_longest(buckets, buckets[1:]):
        is_early = following is not None and packed_bytes(following, UNALIGNED) <= MAX_AHEAD_BYTES
        coming += [start(following)] if is_early else []
        load(named(metas, *coming.pop(0)))
        coming += [start(following)] if following is not None and not is_early else []
