"""Who ends a node's engines, and when the next one starts."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo.engine.client import EngineDied
from grpo.engine.messages import EngineSpec
from grpo.engine.supervisor import EngineSupervisor
from grpo.faults.failure import FailureRecord, JobFailed, StepFailed
from grpo.faults.watch import FailureWatch
from grpo.place.launch import Launch
from grpo.place.timeouts import Timeouts
from grpo.place.topology import plan_node, read_topology
from tests.support.engines import DEADLINE_S, Script, ScriptedEngine
from tests.support.nvml_stand_in import MadeUpGpu, StandIn
from tests.support.pools import wait_until

FAILED = JobFailed(FailureRecord(node=1, rank=1, host="b", phase="sync", cause="it died without a word"))


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


def test_supervisor_close_on_job_failure_leaves_engine_to_sentinel(tmp_path: Path) -> None:
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


GIB = 2**30
LAUNCH = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, num_nodes=1)


class Gpu(MadeUpGpu):
    """Of 80 GiB, 2 of which are others'."""

    def __init__(self) -> None:
        super().__init__(uuid="GPU-1", used=2 * GIB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MadeUpGpu:
    """The second one of this node, reserved for an engine."""
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "pynvml", StandIn(MadeUpGpu(uuid="GPU-0"), gpu))
    return gpu


def supervise(tmp_path: Path, script: Script, **more: Any) -> EngineSupervisor:
    topology = plan_node(LAUNCH, ("0", "1"), reserved_gpus=1, tensor_parallel_size=1, engines_per_node=None)
    assert topology.engines == (("1",),)
    engines = EngineSupervisor(
        EngineSpec(engine_args={}, sampling={}),
        topology,
        FailureWatch(None, node=0, rank=0, host="a"),
        log_folder=tmp_path,
        attempt=0,
        timeout_s=DEADLINE_S,
        start_engine=script.start,
        **more,
    )
    engines.supervise()
    return engines


def test_engine_restart_waits_for_free_gpu_memory(gpu: MadeUpGpu, tmp_path: Path) -> None:
    script = Script()
    engines = supervise(tmp_path, script, max_restarts=1)
    order: list[tuple[str, int]] = []

    def let_go() -> None:
        order.append(("lets go", len(script.started)))
        gpu.used = 3 * GIB  # the driver is not done yet

    engines.before_restart = let_go
    gpu.used = 70 * GIB
    script.started[0].die()
    wait_until(lambda: order)
    asked = gpu.asked
    wait_until(lambda: gpu.asked > asked + 2)
    assert order == [("lets go", 1)]
    assert len(script.started) == 1
    assert engines.has_lost()
    gpu.used = 2 * GIB
    (restart,) = engines.replace_lost()
    assert restart.index == 0
    assert engines.clients == [script.started[1]]
    engines.close()


def test_engine_restart_with_memory_still_taken_starts_after_timeout(gpu: MadeUpGpu, tmp_path: Path) -> None:
    script = Script()
    engines = supervise(tmp_path, script, max_restarts=1, timeouts=Timeouts(device_free_s=0.3))
    gpu.used = 70 * GIB
    script.started[0].die()
    wait_until(engines.has_lost)
    assert len(engines.replace_lost()) == 1
    engines.close()


def test_engine_restart_after_failed_group_close_starts_engine(gpu: MadeUpGpu, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    script = Script()
    engines = supervise(tmp_path, script, max_restarts=1)
    engines.before_restart = fail
    script.started[0].die()
    wait_until(engines.has_lost)
    assert len(engines.replace_lost()) == 1
    engines.close()


def test_engine_restart_with_hanging_group_close_raises_step_failed(gpu: MadeUpGpu, tmp_path: Path) -> None:
    """NCCL's abort may hang."""
    end = threading.Event()
    script = Script()
    short = Timeouts(device_free_s=0.3, engine_notice_s=0.3)
    engines = supervise(tmp_path, script, max_restarts=1, timeouts=short)
    engines.before_restart = end.wait  # type: ignore[assignment]
    script.started[0].die()
    wait_until(engines.has_lost)
    with pytest.raises(StepFailed, match="was killed by signal 9"):
        engines.replace_lost()
    engines.close()
    end.set()


def test_engine_restart_after_request_fault_is_not_counted(tmp_path: Path) -> None:
    script = Script()
    engines = supervise(tmp_path, script, max_restarts=1)
    for number in range(3):
        died = EngineDied("engine 0 of node 0 died of a prompt")
        died.is_requests_fault = number > 0
        script.started[-1]._on_death(died)
        assert len(engines.replace_lost()) == 1
    script.started[-1]._on_death(EngineDied("engine 0 of node 0 died"))
    with pytest.raises(StepFailed, match="GRPO-408"):
        engines.replace_lost()
    engines.close()
