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
        """Ends the transport's operations in flight, from any thread."""
        self._asked: dict[EngineLike, Future[Any]] = {}  # by the last call to all

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Rank 0 of the weight sync group is the sender, then engine by engine its workers."""
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
        """Not of vLLM's client: compare what an update has brought with what was sent."""
        self._on_all("check_bits", [{"sent": sent} for _ in self._clients])

    def end_weight_update(self, policy_version: str) -> None:
        """Not of vLLM's client: as `finish_weight_update`, but the engines keep the adapters that they hold."""
        self._on_all("end_weight_update", [{"policy_version": policy_version} for _ in self._clients])

    def take_adapter(self, number: int, policy_version: str, keep: Collection[int] = ()) -> None:
        """Not of vLLM's client: hold the adapter that the update has brought, and of the others those to keep."""
        arguments = {"number": number, "policy_version": policy_version, "keep": sorted(keep)}
        self._on_all("take_adapter", [arguments for _ in self._clients])

    def pause(self) -> list[dict[int, int]]:
        """Not of vLLM's client: no step begins until `resume`. Tokens so far of the completions of each engine, by id.

        An engine of the node that fails leaves the others paused: they are of no use any more, see `WeightSyncer.sync`.
        """
        return self._on_all("pause", [{} for _ in self._clients])

    def resume(self) -> None:
        """Not of vLLM's client: go on where `pause` has stopped."""
        self._on_all("resume", [{} for _ in self._clients])

    def late(self, what: str) -> EngineError:
        """An error about an engine that has not answered the last call yet."""
        late = [client for client, answer in self._asked.items() if not answer.done()]
        return (late or self._clients)[0].error(what)

    def _on_all(self, method: str, kwargs: list[dict[str, Any]], timeout_s: float | None = None) -> list[Any]:
        """What each engine answers."""
        pool = ThreadPoolExecutor(max_workers=len(self._clients))
        self._asked = {
            client: pool.submit(client.call, method, timeout_s or self._timeout_s, **each)
            for client, each in zip(self._clients, kwargs, strict=True)
        }
        futures = [*self._asked.values()]
        pool.shutdown(wait=False)
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)  # each ends within its deadline
        if waiting or any(future.exception() for future in done):
            self.on_failure()  # the sender, and the other engines, may sit in a broadcast with the one that failed
        for future in [*done, *waiting]:
            future.result()
        return [future.result() for future in futures]
