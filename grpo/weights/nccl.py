"""The trainer's side of the NCCL backend: one small communicator of the local main and its engines' workers.

Imports vLLM only where the group is opened: the rest runs, and is tested, with torch alone.
"""

import base64
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from grpo.engine.client import EngineError
from grpo.weights.buckets import Bucket, described, packed_bytes, packed_places

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

_NO_NCCL = "vLLM could not load NCCL in the trainer [GRPO-501]: set vllm_sync_backend to 'shm', or mend NCCL"
UNALIGNED = 1  # vLLM's worker takes a packed buffer apart without gaps


class NcclTransport:
    """Packed buffers on this rank's GPU, broadcast to all workers of the node's engines.

    A bucket is filled on the current stream and broadcast on a stream of its own, which waits for the first. Both are
    queued by the main thread, bucket by bucket, so the order of operations on a communicator is the same everywhere;
    the push group's has no rank in common with an all-gather that could wait for it but this one. A buffer is free
    again when the engines have answered its update: they synchronise their device first, so the broadcast is over.

    Args:
        buffer_bytes: room for any bucket.
        num_workers: of all the node's engines.
    """

    in_flight = 1  # updates have to be taken up in the order of the broadcasts
    device = "cuda"

    def __init__(self, *, buffer_bytes: int, num_workers: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffers: dict[int, torch.Tensor] = {}  # [bytes] uint8, by index, during a push
        self._stream = torch.cuda.Stream()
        self._num_workers = num_workers
        self._communicator: Any = None
        self._aborted = threading.Event()
        self._abort_lock = threading.Lock()

    def open(self, engines: "VLLMWeightSyncClient", on_refusal: Callable[[EngineError], None]) -> None:
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
            packed_buffer_size_bytes=self._buffer_bytes,  # an update, which is a bucket, fits one broadcast
            packed_num_buffers=1,
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
            raise EngineError("the push group was ended by an earlier failure: it takes no more weights")

    def places(self, index: int, bucket: Bucket) -> list[torch.Tensor]:
        if index not in self._buffers:
            self._buffers[index] = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self.device)
        return packed_places(self._buffers[index], bucket.metas, UNALIGNED)

    def update_info(self, index: int, bucket: Bucket) -> dict[str, Any]:
        return described(bucket.metas)

    def start_sending(self, index: int, bucket: Bucket) -> None:
        """Queue the broadcast, from the main thread, once the engines were told of it: a communicator's first operation
        holds the caller until its peers are there, or until `abort`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        packed = self._buffers[index][: packed_bytes(bucket.metas, UNALIGNED)]
        if self._aborted.is_set():  # right before the call: what is given up is freed
            return
        try:
            self._communicator.broadcast(packed, src=0, stream=self._stream)
        except RuntimeError as error:
            if not self._aborted.is_set():  # else an engine has failed, and its answer says why
                raise EngineError(f"the broadcast to the node's engines failed: {error}") from error

    def end(self) -> None:
        # The memory goes back to the current stream, which must not write to it before the last broadcast is over.
        torch.cuda.current_stream().wait_stream(self._stream)
        self._buffers.clear()

    def abort(self) -> None:
        """End every operation on the push group, from any thread; the group cannot be used again."""
        with self._abort_lock:
            if not self._aborted.is_set():
                self._aborted.set()
                if self._communicator is not None:
                    self._communicator.destroy()

    def close(self) -> None:
        self.abort()
        self._communicator = None
        self._buffers.clear()
