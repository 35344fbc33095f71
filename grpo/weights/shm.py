"""The trainer's side of the shared-memory backend: packs parameters into one buffer that the node's engines read."""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from grpo.engine.plugin import SHM_BACKEND
from grpo.weights.worker import ShmInitInfo, ShmUpdateInfo

ALIGNMENT_BYTES = 64  # of a parameter in the buffer: a view needs its dtype's alignment, kernels like a cache line


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """How much memory to share; the largest parameter fits whatever this says."""

    backend: ClassVar[str] = SHM_BACKEND
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of parameters that fits the buffer."""

    metas: tuple[ParamMeta, ...]
    offsets: tuple[int, ...]


def meta_bytes(meta: ParamMeta) -> int:
    return meta.dtype.itemsize * torch.Size(meta.shape).numel()


def make_chunks(metas: list[ParamMeta], buffer_bytes: int) -> list[Chunk]:
    """Lay parameters out, in order, in as few fillings of the buffer as their order allows.

    Raises:
        ValueError: one parameter is larger than the buffer.
    """
    chunks: list[Chunk] = []
    current: list[ParamMeta] = []
    offsets: list[int] = []
    end = 0
    for meta in metas:
        size = meta_bytes(meta)
        if size > buffer_bytes:
            raise ValueError(f"{meta.name} has {size} bytes, the buffer {buffer_bytes}")
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if start + size > buffer_bytes:
            chunks.append(Chunk(tuple(current), tuple(offsets)))
            current, offsets, start = [], [], 0
        current.append(meta)
        offsets.append(start)
        end = start + size
    if current:
        chunks.append(Chunk(tuple(current), tuple(offsets)))
    return chunks


class ShmSender(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """Sends by filling the buffer and telling the engines what stands in it; the buffer is free again on their answer.

    The buffer is an unnamed memory file: it needs no room in /dev/shm (64 MB in a plain container), no other user can
    open it, and it is gone with the last process that maps it, however that one ends.
    """

    init_info_cls = ShmTrainerInitInfo
    _buffer: torch.Tensor | None = None
    _chunks: Sequence[Chunk] = ()

    @classmethod
    def trainer_init(
        cls, init_info: ShmTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        assert source is not None
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        metas = source.metadata()
        if not sender.is_sender:
            return sender
        num_bytes = max(init_info.buffer_bytes, *(meta_bytes(meta) for meta in metas))
        sender._chunks = make_chunks(metas, num_bytes)
        descriptor = os.memfd_create("grpo-push", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            sender._buffer = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
            client.init_weight_transfer_engine(
                asdict(ShmInitInfo(path=f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes=num_bytes))
            )
        finally:
            os.close(descriptor)
        return sender

    def send_weights(self) -> None:
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass  # takes part in the gathers
            return
        self.client.start_weight_update()
        pairs = iter(self.source)
        for chunk in self._chunks:
            self._fill(chunk, pairs)
            update = ShmUpdateInfo(
                names=[meta.name for meta in chunk.metas],
                dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in chunk.metas],
                shapes=[list(meta.shape) for meta in chunk.metas],
                offsets=list(chunk.offsets),
            )
            self.client.update_weights(asdict(update))
        for name, _ in pairs:  # also ends the walk's last gather
            raise RuntimeError(f"the source yielded {name!r}, which its metadata does not hold")
        self.client.finish_weight_update()

    def _fill(self, chunk: Chunk, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert self._buffer is not None, "send_weights before trainer_init"
        for meta, offset in zip(chunk.metas, chunk.offsets, strict=True):
            name, tensor = next(pairs)
            if (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, tuple(meta.shape)):
                raise RuntimeError(
                    f"the source yielded {name} {tensor.dtype} {tuple(tensor.shape)} where its metadata has {meta}"
                )
            place = self._buffer[offset : offset + meta_bytes(meta)]
            place.view(meta.dtype).view(tensor.shape).copy_(tensor)

    def shutdown(self) -> None:
        self._buffer = None
