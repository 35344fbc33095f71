"""The trainer's side of the shared-memory backend: packed buffers that the node's engines read."""

import mmap
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

from grpo.engine.client import EngineError
from grpo.weights.buckets import Bucket, described, packed_offsets, packed_places
from grpo.weights.worker import ShmInitInfo


class ShmTransport:
    """Packed buffers in one unnamed memory file.

    It needs no room in /dev/shm (64 MB in a plain container), no other user can open it, and it is gone with the last
    process that maps it, however that one ends. A buffer is free again when the engines have answered its update: they
    copy what they keep. The next update waits at the engines when they answer one, so that they need not wait for it.
    """

    in_flight = 2

    def __init__(self, *, num_buffers: int, buffer_bytes: int) -> None:
        self._num_bytes = num_buffers * buffer_bytes
        self._begins = [index * buffer_bytes for index in range(num_buffers)]
        self._descriptor = os.memfd_create("grpo-push", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, self._num_bytes)
        mapped = torch.frombuffer(mmap.mmap(self._descriptor, self._num_bytes), dtype=torch.uint8)
        self._buffers = mapped.split(buffer_bytes)

    def open(self, engines: VLLMWeightSyncClient, on_refusal: Callable[[EngineError], None]) -> None:
        """Let the engines map the file, through this process's /proc entry."""
        del on_refusal  # a refusal is raised at once
        try:
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            engines.init_weight_transfer_engine(asdict(ShmInitInfo(path=path, num_bytes=self._num_bytes)))
        finally:
            os.close(self._descriptor)

    def places(self, index: int, bucket: Bucket) -> list[torch.Tensor]:
        return packed_places(self._buffers[index], bucket.metas)

    def update_info(self, index: int, bucket: Bucket) -> dict[str, Any]:
        offsets = [self._begins[index] + offset for offset in packed_offsets(bucket.metas)]
        return {**described(bucket.metas), "offsets": offsets}

    def start_sending(self, index: int, bucket: Bucket) -> None:
        """Nothing to do: the engines read the buffer themselves."""

    def abort(self) -> None:
        """Nothing of this transport waits."""

    def close(self) -> None:
        self._buffers = ()
