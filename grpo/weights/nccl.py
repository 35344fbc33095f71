"""The trainer's side of the NCCL backend: one small communicator of the local main and its engines' workers."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_common import trainer_init as open_trainer_endpoint
from vllm.utils.network_utils import get_open_port

from grpo.engine.client import EngineError
from grpo.weights.buckets import Bucket, described, meta_bytes, packed_places

DEVICE = "cuda"
UNALIGNED = 1  # vLLM's worker takes a packed buffer apart without gaps


class NcclTransport:
    """Packed buffers on this rank's GPU, broadcast to all workers of the node's engines.

    A bucket is filled on the current stream and broadcast on a stream of its own, which waits for the first. Both are
    queued by the main thread, bucket by bucket, so the order of operations on a communicator is the same everywhere;
    the push group's has no rank in common with an all-gather that could wait for it but this one. A buffer is free
    again when the engines have answered its update: they synchronise their device first, so the broadcast is over.
    """

    in_flight = 1  # updates have to be taken up in the order of the broadcasts

    def __init__(self, *, num_buffers: int, buffer_bytes: int, num_workers: int) -> None:
        # vLLM's `current_stream()` makes a side stream current, for good, unless it has seen one being set (0.31).
        torch.cuda.set_stream(torch.cuda.current_stream())
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(num_buffers)]
        self._stream = torch.cuda.Stream()
        self._num_workers = num_workers
        self._communicator: Any = None
        self._aborted = False

    def open(self, engines: VLLMWeightSyncClient, on_refusal: Callable[[EngineError], None]) -> None:
        """Meet the workers.

        Args:
            on_refusal: told at once of an engine that will not come; this rank may wait for it for minutes.

        Raises:
            EngineError: an engine refused.
            RuntimeError: vLLM could not load NCCL here, or the workers did not come.
        """
        info = NCCLWeightTransferInitInfo(
            master_address="127.0.0.1",
            master_port=get_open_port(),
            rank_offset=1,
            world_size=1 + self._num_workers,
            packed=True,
            packed_buffer_size_bytes=self._buffers[0].numel(),  # an update, which is a bucket, fits one broadcast
            packed_num_buffers=1,
        )
        # The workers wait for this rank inside of the call, and this rank for them.
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            answer = pool.submit(engines.init_weight_transfer_engine, worker_init_payload(info))

            def tell(done: Future[None]) -> None:
                if isinstance(error := done.exception(), EngineError):
                    on_refusal(error)

            answer.add_done_callback(tell)
            try:
                self._communicator = open_trainer_endpoint(info)
            except Exception:  # workers that failed do not come
                if answer.done():
                    answer.result()
                raise
            # vLLM goes on without NCCL when it cannot load it, and its broadcasts then do nothing.
            if getattr(self._communicator, "disabled", False):
                raise RuntimeError(
                    "vLLM could not load NCCL in the trainer: set vllm_sync_backend to 'shm', or mend NCCL"
                )
            answer.result()
        finally:
            pool.shutdown(wait=False)

    def places(self, index: int, bucket: Bucket) -> list[torch.Tensor]:
        return packed_places(self._buffers[index], bucket.metas, UNALIGNED)

    def update_info(self, index: int, bucket: Bucket) -> dict[str, Any]:
        return described(bucket.metas)

    def start_sending(self, index: int, bucket: Bucket) -> None:
        """Queue the broadcast, from the main thread, once the engines were told of it: a communicator's first operation
        holds the caller until its peers are there."""
        if self._aborted:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        num_bytes = sum(meta_bytes(meta) for meta in bucket.metas)
        try:
            self._communicator.broadcast(self._buffers[index][:num_bytes], src=0, stream=self._stream)
        except RuntimeError:
            if not self._aborted:  # else an engine has failed, and its answer says why
                raise

    def abort(self) -> None:
        """End every operation on the push group, from any thread; the group cannot be used again."""
        self._aborted = True
        if self._communicator is not None:
            self._communicator.destroy()

    def close(self) -> None:
        self.abort()
        self._communicator = None
        self._buffers = []
