"""The trainer's side of the shared-memory backend: packed buffers that the node's engines read."""

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from grpo.engine.client import EngineError
from grpo.weights.buckets import NUM_BUFFERS, Bucket, described, packed_offsets, packed_places

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient


class ShmTransport:
    """Packed buffers in one unnamed memory file.

    It needs no room in /dev/shm (64 MB in a plain container), no other user can open it, and it is gone with the last
    process that maps it, however that one ends. A buffer is free again when the engines have answered its update: they
    copy what they keep. The next update waits at the engines when they answer one, so that they need not wait for it.
    The file stays between pushes, in host memory.

    Args:
        buffer_bytes: room for any bucket.
        num_workers: of all the node's engines.
    """

    in_flight = 2
    device = "cpu"

    def __init__(self, *, buffer_bytes: int, num_workers: int) -> None:
        del num_workers  # each maps the file
        self._num_bytes = NUM_BUFFERS * buffer_bytes
        self._begins = [index * buffer_bytes for index in range(NUM_BUFFERS)]
        self._descriptor = os.memfd_create("grpo-push", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, self._num_bytes)
        mapped = torch.frombuffer(mmap.mmap(self._descriptor, self._num_bytes), dtype=torch.uint8)
        self._buffers = mapped.split(buffer_bytes)

    def open(self, engines: "VLLMWeightSyncClient", on_refusal: Callable[[EngineError], None]) -> None:
        """Let the engines map the file, through this process's /proc entry."""
        del on_refusal  # a refusal is raised at once
        try:
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            # The fields of `worker.ShmInitInfo`, whose module would bring vLLM into this process: seconds.
            engines.init_weight_transfer_engine({"path": path, "num_bytes": self._num_bytes})
        finally:
            os.close(self._descriptor)

    def begin(self) -> None:
        """Nothing to do: the buffers are there."""

    def places(self, index: int, bucket: Bucket) -> list[torch.Tensor]:
        return packed_places(self._buffers[index], bucket.metas)

    def update_info(self, index: int, bucket: Bucket) -> dict[str, Any]:
        offsets = [self._begins[index] + offset for offset in packed_offsets(bucket.metas)]
        return {**described(bucket.metas), "offsets": offsets}

    def start_sending(self, index: int, bucket: Bucket) -> None:
        """Nothing to do: the engines read the buffer themselves."""

    def end(self) -> None:
        """Nothing to do: the engines have the file mapped."""

    def abort(self) -> None:
        """Nothing of this transport waits."""

    def close(self) -> None:
        self._buffers = ()
