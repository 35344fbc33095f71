"""All engines of a node as one client of vLLM's weight transfer."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from grpo.engine.client import EngineError
from grpo.engine.like import EngineLike

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdatePayload


class NodeEngines:
    """vLLM's four-method weight-sync client over all engines of a node, called concurrently."""

    def __init__(self, clients: Sequence[EngineLike], *, tensor_parallel_size: int, timeout_s: float) -> None:
        self._clients = list(clients)
        self._tensor_parallel_size = tensor_parallel_size
        self._timeout_s = timeout_s
        self.on_failure: Callable[[], None] = lambda: None
        """Called on a failure, from any thread; ends the transport's operations in progress."""
        self._asked: dict[EngineLike, Future[Any]] = {}  # by the last call to all

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Initialise the transfer; rank 0 of the weight sync group is the sender, followed by the workers, engine by
        engine."""
        infos = [dict(init_info) for _ in self._clients]
        if "rank_offset" in init_info:
            for index, info in enumerate(infos):
                info["rank_offset"] = 1 + index * self._tensor_parallel_size
        self._on_all("init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        self._on_all("start_weight_update", [{} for _ in self._clients])

    def update_weights(self, update_info: "WeightTransferUpdatePayload", timeout_s: float | None = None) -> None:
        self._on_all("update_weights", [{"update_info": update_info} for _ in self._clients], timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._on_all("finish_weight_update", [{"weight_version": weight_version} for _ in self._clients])

    def check_bits(self, sent: dict[str, int]) -> None:
        """Compare received tensors with the sent ones; not part of vLLM's client."""
        self._on_all("check_bits", [{"sent": sent} for _ in self._clients])

    def end_weight_update(self, policy_version: str) -> None:
        """Finish as `finish_weight_update`, but keep the engines' adapters; not part of vLLM's client."""
        self._on_all("end_weight_update", [{"policy_version": policy_version} for _ in self._clients])

    def take_adapter(self, number: int, policy_version: str, keep: Collection[int] = ()) -> None:
        """Let the engines hold the received adapter, and of the others those in `keep`; not part of vLLM's client."""
        arguments = {"number": number, "policy_version": policy_version, "keep": sorted(keep)}
        self._on_all("take_adapter", [arguments for _ in self._clients])

    def pause(self) -> list[dict[int, int]]:
        """Pause all engines: no step starts until `resume`; not part of vLLM's client.

        Returns tokens so far of each engine's completions, by id. If one engine fails, the others stay paused: they are
        useless then, see `WeightSyncer.sync`.
        """
        return self._on_all("pause", [{} for _ in self._clients])

    def resume(self) -> None:
        """Resume all engines after `pause`; not part of vLLM's client."""
        self._on_all("resume", [{} for _ in self._clients])

    def late(self, what: str) -> EngineError:
        """Make an error about an engine that has not answered the last call yet."""
        late = [client for client, answer in self._asked.items() if not answer.done()]
        return (late or self._clients)[0].error(what)

    def _on_all(self, method: str, kwargs: list[dict[str, Any]], timeout_s: float | None = None) -> list[Any]:
        """Call all engines; return their answers."""
        pool = ThreadPoolExecutor(max_workers=len(self._clients))
        self._asked = {
            client: pool.submit(client.call, method, timeout_s or self._timeout_s, **each)
            for client, each in zip(self._clients, kwargs, strict=True)
        }
        futures = [*self._asked.values()]
        pool.shutdown(wait=False)
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)  # each ends within its deadline
        if waiting or any(future.exception() for future in done):
            self.on_failure()  # the sender, and the other engines, may wait in a broadcast with the failed one
        for future in [*done, *waiting]:
            future.result()
        return [future.result() for future in futures]
