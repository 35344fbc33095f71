"""The trainer's side of the shared-memory backend: packed buffers read by the node's engines."""

import contextlib
import mmap
import os
import select
from collections.abc import Callable
from io import FileIO
from typing import TYPE_CHECKING

import torch

from grpo.engine.client import EngineError
from grpo.weights.buckets import NUM_BUFFERS, Bucket, packed_places

if TYPE_CHECKING:
    from grpo.weights.node_engines import NodeEngines

FILLED, GIVEN_UP = b"\1", b"\0"
"""Bytes written to a worker: the next bucket is filled; the weight sync is given up."""


class ShmTransport:
    """Packed buffers in one anonymous memory file, and pipes that announce filled and read buckets.

    It needs no space in /dev/shm (64 MB in a plain container), no other user can open it, and it vanishes with the last
    process that maps it. Workers copy their tensors out of a buffer, which is free again when all of them have written
    their number into the common pipe. The file stays between weight syncs, in host memory.

    Args:
        buffer_bytes: capacity for any bucket.
        num_workers: of all the node's engines, at most 256.
    """

    device = "cpu"

    def __init__(self, *, buffer_bytes: int, num_workers: int) -> None:
        self._num_bytes = NUM_BUFFERS * buffer_bytes
        self._descriptor = os.memfd_create("grpo-sync", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, self._num_bytes)
        mapped = torch.frombuffer(mmap.mmap(self._descriptor, self._num_bytes), dtype=torch.uint8)
        self._buffers = mapped.chunk(NUM_BUFFERS)
        self._num_taken = [0] * num_workers  # buckets of this weight sync, by worker
        self._filled = [_pipe() for _ in range(num_workers)]  # the workers' ends first, as in `_taken`
        taken, workers_end = _pipe()
        self._taken = (workers_end, taken)  # both stay open: a pipe without a writer has nothing to wait for
        self._poll = select.poll()
        self._poll.register(taken, select.POLLIN)
        self._is_aborted = False

    def open(self, engines: "NodeEngines", on_refusal: Callable[[EngineError], None]) -> None:
        """Let the workers map the file and open their ends of the pipes, through this process's /proc entry."""
        del on_refusal  # a refusal is raised at once
        folder = f"/proc/{os.getpid()}/fd"
        # Fields of `worker.ShmInitInfo`; its module would import vLLM into this process, which takes seconds.
        info = {
            "path": f"{folder}/{self._descriptor}",
            "num_bytes": self._num_bytes,
            "filled": [f"{folder}/{end.fileno()}" for end, _ in self._filled],
            "taken": f"{folder}/{self._taken[0].fileno()}",
            "rank_offset": 1,
        }
        try:
            engines.init_weight_transfer_engine(info)
        finally:
            os.close(self._descriptor)
            for workers_end, _ in self._filled:
                workers_end.close()

    def begin(self) -> None:
        if self._is_aborted:
            raise EngineError("the weight sync group was ended by an earlier failure: it takes no more weights")
        while self._poll.poll(0):  # left from the last weight sync: the engines' answers may come before all reads
            os.read(self._taken[1].fileno(), 4096)
        self._num_taken = [0] * len(self._num_taken)

    def places(self, number: int, bucket: Bucket) -> list[torch.Tensor]:
        return packed_places(self._buffers[number % NUM_BUFFERS], bucket.metas)

    def start_sending(self, number: int, bucket: Bucket) -> None:
        """Announce the bucket to the workers, which read the buffer themselves."""
        self._send(FILLED)

    def is_taken(self, number: int, wait_s: float) -> bool:
        while min(self._num_taken) <= number and self._poll.poll(1000 * wait_s):
            for worker in os.read(self._taken[1].fileno(), 4096):
                self._num_taken[worker] += 1
        return min(self._num_taken) > number

    def end(self) -> None:
        """Do nothing: the engines keep the file mapped."""

    def abort(self) -> None:
        self._is_aborted = True
        self._send(GIVEN_UP)

    def _send(self, word: bytes) -> None:
        for _, end in self._filled:
            with contextlib.suppress(OSError, ValueError):  # a worker is gone, or this is closed: reported elsewhere
                end.write(word)

    def close(self) -> None:
        self._buffers = ()
        for end in (*(end for _, end in self._filled), *self._taken):
            end.close()


def _pipe() -> tuple[FileIO, FileIO]:
    """Return (reader, writer)."""
    reader, writer = os.pipe()
    return FileIO(reader, "r"), FileIO(writer, "w")
