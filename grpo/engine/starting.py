"""A node's engines from their start until they take work: they start while the trainer loads its model."""

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo.engine.client import EngineClient, EngineError
from grpo.engine.early import drop_host
from grpo.engine.environment import engine_environment
from grpo.engine.messages import EngineSpec, Ready
from grpo.job.topology import NodeTopology
from grpo.job.watch import FailureWatch

StartEngine = Callable[..., EngineClient]
"""Takes what `EngineClient` takes."""


class StartingEngines:
    """The engines of this node. Every rank has one of these; on other ranks than the local main it holds no engine.

    They end with this object, at the latest with the interpreter: a notebook's next trainer needs the GPUs.

    Args:
        log_folder: where each engine writes its own log.
        attempt: of the run, for the names of the logs.
        timeout_s: from the start of an engine until it is ready.
        start_engine: `EngineClient`, or what a test puts in its place.
    """

    def __init__(
        self,
        spec: EngineSpec,
        topology: NodeTopology,
        watch: FailureWatch,
        *,
        log_folder: Path,
        attempt: int,
        timeout_s: float,
        start_engine: StartEngine = EngineClient,
    ) -> None:
        self.topology = topology
        self._watch = watch
        self._timeout_s = timeout_s

        def on_death(error: EngineError) -> None:  # does not hold this object, which it would keep alive
            if not watch.stop_was_asked():
                watch.fail(error)

        self.clients: list[EngineClient] = [
            start_engine(
                spec,
                name=f"engine {index} of node {topology.node}",
                environment=engine_environment(
                    os.environ,
                    devices=devices,
                    tensor_parallel_size=topology.tensor_parallel_size,
                    engines_per_node=topology.num_engines,
                ),
                log_path=log_folder / f"engine-node{topology.node}-{index}.attempt-{attempt}.log",
                on_death=on_death,
            )
            for index, devices in enumerate(topology.engines if topology.is_local_main else ())
        ]
        drop_host()  # one that no engine of this node has taken
        self._ender = weakref.finalize(self, _close_all, self.clients)

    def wait_ready(self) -> list[Ready]:
        """Wait until all engines take work; not collective.

        Raises:
            EngineError: one ended first, or the deadline passed.
            JobFailed: the job failed elsewhere meanwhile.
        """
        return [client.wait_ready(self._timeout_s, self._watch.check) for client in self.clients]

    def close(self) -> None:
        """End the engines. Safe to call twice."""
        self._ender()


def _close_all(clients: Sequence[EngineClient]) -> None:
    for client in clients:
        client.close()
