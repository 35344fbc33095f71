"""The deadline of the bandwidth stage: a rank that is stuck in a collective is ended, and who is missing is named."""

import json
import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from grpo.job.launch import Launch

_POLL_S = 0.3
_SPREAD_S = 2.0  # a rank that failed stays this long, for the one that prints to hear of it


class StageWatch:
    """This rank's end. Every rank of the launch has one, over a store that all share.

    One daemon thread with a connection of its own looks for a failure of any rank and at the clock, whatever the main
    thread is stuck in. On a hit one rank tells (`on_failure`), and every rank ends with exit code 1.

    Args:
        on_failure: called in the thread, on one rank, with the stage, what failed, and the nodes that did not reach it.
        cleanup: called in the thread, on every rank, before it ends.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        launch: Launch,
        host: str,
        deadline_s: float,
        on_failure: Callable[[str, str, list[str]], None],
        cleanup: Callable[[], None],
    ) -> None:
        self._store = dist.PrefixStore("grpo/doctor", store)
        self._own = dist.PrefixStore("grpo/doctor", store.clone())
        self._launch, self._host, self._deadline_s = launch, host, deadline_s
        self._on_failure, self._cleanup = on_failure, cleanup
        self._stages = 0
        self._stage = "start"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="grpo-doctor-watch", daemon=True)
        self._thread.start()

    def enter(self, stage: str) -> None:
        """This rank begins `stage`; all ranks enter the same ones in the same order."""
        self._stages += 1
        self._stage = stage
        self._store.set(f"at/{self._launch.rank}", json.dumps([self._stages, stage, self._host]))

    def fail(self, what: str) -> None:
        """This rank cannot go on. Ends the process, after all ranks have heard of it."""
        self._store.compare_set("failure", "", json.dumps([self._stage, what]))
        self._thread.join()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        end = time.monotonic() + self._deadline_s
        while not self._stopped.wait(_POLL_S):
            try:
                if self._own.check(["failure"]):
                    stage, what = json.loads(self._own.get("failure"))
                    self._tell(stage, what, [])
                    break
                if time.monotonic() > end:
                    stage, late = self._furthest()
                    self._tell(stage, f"no end within {self._deadline_s:.0f} s", late)
                    break
            except (dist.DistError, RuntimeError):
                break  # the store went with its launcher: another rank has told
        if not self._stopped.is_set():
            time.sleep(_SPREAD_S)
            self._cleanup()
            os._exit(1)

    def _furthest(self) -> tuple[str, list[str]]:
        """The last stage that any rank entered, and the nodes of the ranks that did not get there."""
        at: list[tuple[int, str, str]] = []  # stage's number, stage, host of each rank
        for rank in range(self._launch.world_size):
            known = self._own.check([f"at/{rank}"])
            at.append(tuple(json.loads(self._own.get(f"at/{rank}"))) if known else (0, "start", ""))
        number, stage, _ = max(at)
        size = self._launch.local_world_size
        late = {rank // size: host for rank, (reached, _, host) in enumerate(at) if reached < number}
        return stage, [f"node {node} ({host})" if host else f"node {node}" for node, host in late.items()]

    def _tell(self, stage: str, what: str, late: list[str]) -> None:
        """On the first rank that asks to: the others' copies would tear the table apart."""
        if self._own.add("tellers", 1) == 1:
            self._on_failure(stage, what, late)
