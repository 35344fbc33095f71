"""Who ends a node's engines."""

from pathlib import Path
from typing import Any

import pytest

from grpo.engine.messages import EngineSpec
from grpo.engine.supervisor import EngineSupervisor
from grpo.faults.failure import FailureRecord, JobFailed
from grpo.faults.watch import FailureWatch
from grpo.place.topology import read_topology
from tests.support.engines import ScriptedEngine

FAILED = JobFailed(FailureRecord(node=1, rank=1, host="b", phase="push", cause="it died without a word"))


class Watch(FailureWatch):
    """Knows what the node's sentinel would end."""

    def __init__(self) -> None:
        super().__init__(None, node=0, rank=0, host="a")
        self.covered: set[Path] = set()

    def covers(self, folder: Path, session: int | None = None) -> None:
        self.covered.add(folder)

    def uncovers(self, folder: Path) -> None:
        self.covered.remove(folder)


class Unending(ScriptedEngine):
    """The job's failure comes while it is ended."""

    def close(self) -> None:
        raise FAILED


def test_what_the_jobs_failure_keeps_from_being_ended_stays_the_sentinels(tmp_path: Path) -> None:
    watch = Watch()
    made: list[ScriptedEngine] = []

    def start_engine(spec: EngineSpec, *, name: str, **_: Any) -> ScriptedEngine:
        made.append(ScriptedEngine(name) if made else Unending(name))
        return made[-1]

    topology = read_topology(
        use_cpu=True, reserved_gpus=0, tensor_parallel_size=1, engines_per_node=2, num_attention_heads=4
    )
    spec = EngineSpec(engine_args={}, sampling={})
    engines = EngineSupervisor(
        spec, topology, watch, log_folder=tmp_path, attempt=0, timeout_s=1.0, start_engine=start_engine
    )
    first, second = made
    assert watch.covered == {first.private_folder, second.private_folder}
    with pytest.raises(JobFailed):
        engines.close()
    assert second.is_closed
    assert watch.covered == {first.private_folder}
