"""One push: every rank walks the source, each local main sends to its node's engines."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightTransferUpdatePayload
from vllm.utils.network_utils import get_open_port

from grpo.engine.client import EngineClient, EngineError
from grpo.weights.nccl import NodeNCCLInitInfo, NodeNCCLSender
from grpo.weights.shm import ShmSender, ShmTrainerInitInfo
from grpo.weights.source import GatheredSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What one push cost this rank."""

    total_s: float
    gather_s: float
    """Time in all-gathers; 0 where nothing is sharded."""
    send_s: float
    """The rest: copying, transport and loading in the engines. Little on ranks that send nothing."""
    num_bytes: int
    """Bytes that each engine was sent; 0 on ranks that send nothing."""


class NodeEngines:
    """vLLM's four-method weight-sync client over all engines of a node, called concurrently.

    Supplies what vLLM's senders leave out (0.31): each engine's own rank offset in the push group, where the sender
    fixes 1, and the weight version, which the sender does not pass.
    """

    def __init__(self, clients: Sequence[EngineClient], *, tensor_parallel_size: int, timeout_s: float) -> None:
        self._clients = list(clients)
        self._tensor_parallel_size = tensor_parallel_size
        self._timeout_s = timeout_s
        self.next_version = ""
        self.on_failure: Callable[[], None] = lambda: None
        """Ends the transport's operations in flight, from any thread."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._on_all("init_weight_transfer_engine", [{"init_info": info} for info in self.init_infos(init_info)])

    def init_infos(self, init_info: dict[str, Any]) -> list[dict[str, Any]]:
        """`init_info` for each engine: rank 0 of the push group is the sender, then engine by engine its workers."""
        if "rank_offset" not in init_info:
            return [init_info for _ in self._clients]
        return [
            {**init_info, "rank_offset": 1 + index * self._tensor_parallel_size} for index in range(len(self._clients))
        ]

    def start_weight_update(self) -> None:
        self._on_all("start_weight_update", [{} for _ in self._clients])

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        self._on_all("update_weights", [{"update_info": update_info} for _ in self._clients])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = weight_version if weight_version is not None else self.next_version
        self._on_all("finish_weight_update", [{"weight_version": version} for _ in self._clients])

    def _on_all(self, method: str, kwargs: list[dict[str, Any]]) -> list[Any]:
        pool = ThreadPoolExecutor(max_workers=len(self._clients))
        futures = [
            pool.submit(client.call, method, self._timeout_s, **each)
            for client, each in zip(self._clients, kwargs, strict=True)
        ]
        pool.shutdown(wait=False)
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)  # each ends within its deadline
        if waiting or any(future.exception() for future in done):
            self.on_failure()  # the sender, and the other engines, may sit in a broadcast with the one that failed
        return [future.result() for future in [*done, *waiting]]


class Pusher:
    """Pushes the trainer's weights to this node's engines.

    Collective: every rank of the job makes one, connects it and calls `push`, in the same order.

    Args:
        clients: the node's engines on its local main; None on every other rank.
        bucket_bytes: upper size of a gathered bucket, and of the shared buffer.
        timeout_s: deadline of one call to an engine, and of a whole NCCL push.
    """

    def __init__(
        self,
        source: GatheredSource,
        clients: Sequence[EngineClient] | None,
        *,
        backend: str,
        tensor_parallel_size: int,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self.source = source
        self.backend = backend
        self._clients = clients
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._tensor_parallel_size = tensor_parallel_size
        self._engines = NodeEngines(clients or [], tensor_parallel_size=tensor_parallel_size, timeout_s=timeout_s)
        self._sender: TrainerWeightTransferEngine | None = None

    def connect(self) -> None:
        """Open the push group of this node; not collective over ranks.

        Raises:
            EngineError: an engine refused, on the local main.
        """
        rank = 0 if self._clients is not None else 1  # rank 0 is vLLM's word for the sender
        if self.backend == "nccl":
            num_workers = len(self._clients or []) * self._tensor_parallel_size
            self._sender = NodeNCCLSender.trainer_init(
                NodeNCCLInitInfo(
                    rank=rank,
                    master_address="127.0.0.1",
                    master_port=get_open_port(),
                    world_size=1 + num_workers,
                    # One buffer, so one stream. A bucket's tensors are made on the stream that is current when the
                    # bucket begins; with two, vLLM would copy the rest of it on the other, which waits for nothing.
                    packed_num_buffers=1,
                ),
                client=self._engines,
                source=self.source,
            )
            self._engines.on_failure = self._sender.abort
        else:
            self._sender = ShmSender.trainer_init(
                ShmTrainerInitInfo(rank=rank, buffer_bytes=self._bucket_bytes), client=self._engines, source=self.source
            )

    def push(self, version: int) -> tuple[PushReport, EngineError | None]:
        """Bring the engines to the current weights. Collective over the trainer's world group under ZeRO-3.

        When an engine of this node fails, the walk is finished all the same, so that no other rank hangs in a gather,
        and the error is handed back for the caller to share.

        Args:
            version: the optimizer step of the weights; the engines' policy version afterwards.
        """
        assert self._sender is not None, "push before connect"
        begun = time.perf_counter()
        self._engines.next_version = str(version)
        walks_begun = self.source.walks_begun
        error: EngineError | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the NCCL sender gathers on side streams, which must see the optimizer's writes
        try:
            if isinstance(self._sender, NodeNCCLSender):
                self._sender.send_within(self._timeout_s)
            else:
                self._sender.send_weights()
            for client in self._clients or []:
                if not client.call("reset_prefix_cache", self._timeout_s):
                    raise client.error("did not drop its prefix cache after a push: requests are still running")
        except EngineError as engine_error:
            error = engine_error
            self.source.finish_walk(walks_begun)
        total_s = time.perf_counter() - begun
        report = PushReport(
            total_s=total_s,
            gather_s=self.source.gather_s,
            send_s=total_s - self.source.gather_s,
            num_bytes=self.source.wire_bytes if self._clients is not None else 0,
        )
        return report, error

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None
