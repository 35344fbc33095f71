"""The NCCL backend: one small communicator of the local main and its engines' workers.

Imports vLLM only where the group is opened: the rest runs, and is tested, with torch alone.
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
MAX_AHEAD_BYTES = 2**30  # of a bucket that is received while one is loaded: engines leave so much memory free
UNALIGNED = 1  # as in vLLM's own packed transfers there are no gaps


class NcclTransport:
    """Packed buffers on this rank's GPU, broadcast to all workers of the node's engines.

    A bucket is filled on the current stream and broadcast on a stream of its own, which waits for the first. Both are
    queued by the main thread, bucket by bucket, so the order of operations on a communicator is the same everywhere;
    the weight sync group's has no rank in common with an all-gather that could wait for it but this one. A buffer is
    free again when its broadcast is over.

    Args:
        buffer_bytes: space for any bucket.
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
        """Meet the workers.

        Args:
            on_refusal: told at once of an engine that will not come; this rank may wait for it for minutes.

        Raises:
            EngineError: an engine refused.
            RuntimeError: vLLM could not load NCCL here, or the workers did not come.
        """
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer import nccl_common

        # vLLM's `current_stream()` makes a side stream current, for good, unless it has seen one being set since it was
        # imported (0.31).
        torch.cuda.set_stream(torch.cuda.current_stream())
        try:
            unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        except (OSError, ValueError, AttributeError) as error:  # no library, a torch without one, an older one
            raise RuntimeError(_NO_NCCL) from error
        # The id goes over the engines' sockets. vLLM's other way is a store on a port, from which the workers unpickle.
        info = nccl_common.NCCLWeightTransferInitInfo(
            nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
            rank_offset=1,
            world_size=1 + self._num_workers,
            packed=True,
        )
        # The workers wait for this rank inside of the call, and this rank for them.
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            answer = pool.submit(engines.init_weight_transfer_engine, nccl_common.worker_init_payload(info))

            def tell(done: Future[None]) -> None:
                if isinstance(error := done.exception(), EngineError):
                    on_refusal(error)

            answer.add_done_callback(tell)
            try:
                self._communicator = nccl_common.uid_init_process_group(
                    unique_id, 0, info.world_size, torch.accelerator.current_device_index()
                )
            except Exception:  # workers that failed do not come
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
        """Queue the broadcast, from the main thread, once the engines were told of it: a communicator's first operation
        holds the caller until its peers are there, or until `abort`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        packed = self._buffers[number % NUM_BUFFERS][: packed_bytes(bucket.metas, UNALIGNED)]
        if self._aborted.is_set():  # right before the call: what is given up is freed
            return
        try:
            self._communicator.broadcast(packed, src=0, stream=self._stream)
        except RuntimeError as error:
            if not self._aborted.is_set():  # else an engine has failed, and its answer says why
                raise EngineError(f"the broadcast to the node's engines failed: {error}") from error
        self._sent[number % NUM_BUFFERS] = self._stream.record_event()

    def is_taken(self, number: int, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        sent = self._sent.get(number % NUM_BUFFERS)  # None: not after an abort
        while not (taken := sent is None or sent.query()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return bool(taken)

    def end(self) -> None:
        # The memory goes back to the current stream, which must not write to it before the last broadcast is over.
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
    """The workers' side: one bucket is received while the one before it is loaded.

    vLLM's own consumer (0.31) ends a buffer where it is full, and we where a bucket ends. It also loads on several
    streams in turn, while the layer-wise reload keeps what has come of a layer from one to the next.

    Args:
        group: vLLM's communicator.
        load: called with the tensors of each bucket, in order; they are views of memory that nobody writes to again as
            long as they are kept.
        device: where they come.
    """
    loading, receiving = torch.cuda.current_stream(), torch.cuda.Stream()

    def start(metas: Sequence[ParamMeta]) -> tuple[torch.Tensor, Any]:
        packed = torch.empty(packed_bytes(metas, UNALIGNED), dtype=torch.uint8, device=device)
        receiving.wait_stream(loading)  # which may have loaded out of this memory before
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
