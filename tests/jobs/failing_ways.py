"""Failures as they are raised, and what follows each: of the package that stands first in PYTHONPATH.

    python failing_ways.py FOLDER

Prints, in JSON by failure, its text and what the code makes of it: kind, exit codes of the launcher before and behind
the first step, lost nodes, what is reported in a few lines, and what the report finds.
"""

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo.engine.client import EngineClient
from grpo.engine.messages import EngineSpec
from grpo.faults.failure import GenerationDropped, JobFailed
from grpo.faults.kinds import record_of
from grpo.faults.liveness import NodePlace
from grpo.faults.sentinel_start import start_sentinel
from grpo.ops.launch import lost_nodes, next_attempt
from grpo.ops.mistakes import reporting_mistakes
from grpo.ops.report.symptoms import matching
from grpo.place.launch import Launch
from grpo.place.topology import plan_node
from grpo.record.folder import RunFolder

NODES = ["a", "b", "c"]


def engine(folder: Path, *, vllm: str = "", kill: bool = False) -> None:
    """Starts an engine whose vLLM does as asked when it is imported."""
    package = folder / "vllm_of_this_test"
    (package / "vllm").mkdir(parents=True)
    (package / "vllm" / "__init__.py").write_text(vllm)
    path = os.pathsep.join([str(package), os.environ["PYTHONPATH"]])
    spec = EngineSpec(engine_args={}, sampling={})
    client = EngineClient(
        spec, name="engine 0", environment={**os.environ, "PYTHONPATH": path}, log_path=folder / "log"
    )
    try:
        if kill:
            os.kill(client.pid, signal.SIGKILL)
        client.wait_ready(60)
    finally:
        client.close()


def engine_is_late(folder: Path) -> None:
    spec = EngineSpec(engine_args={}, sampling={})
    client = EngineClient(spec, name="engine 0", environment=os.environ, log_path=folder / "log")
    try:
        client.wait_ready(0.01)
    finally:
        client.close()


def placement(folder: Path) -> None:
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, num_nodes=1)
    plan_node(launch, ("0", "1"), reserved_gpus=9, tensor_parallel_size=4, engines_per_node=None)


def sentinel(folder: Path) -> None:
    start_sentinel({"node": 1})


def raises(error: BaseException) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        raise error

    return act


PLACE = NodePlace(node=1, rank=8, host="b", pid=7)
HUB = NodePlace(node=0, rank=0, host="a", pid=7)
WAYS: dict[str, Callable[[Path], None]] = {
    "a placement": placement,
    "a setting that the engine refuses": lambda folder: engine(folder, vllm="raise ValueError('max_model_len is 9')"),
    "vLLM's memory": lambda folder: engine(
        folder, vllm="raise ValueError('No available memory for the cache blocks. Try')"
    ),
    "CUDA's memory": raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    "CUDA": raises(RuntimeError("CUDA error: uncorrectable ECC error encountered")),
    "a sentinel": sentinel,
    "a killed engine": lambda folder: engine(folder, vllm="import time; time.sleep(60)", kill=True),
    "a late engine": engine_is_late,
    "a silent node": raises(JobFailed(PLACE.is_silent(20))),
    "a cut link": raises(JobFailed(PLACE.has_no_link_to(HUB, 20))),
    "a node 0 that is cut off": raises(JobFailed(HUB.is_cut_off("2 of 2 other nodes at once (1, 2)", 20))),
    "a node that is gone": raises(JobFailed(PLACE.is_gone(0, 20))),
    "a generation after a stop": raises(GenerationDropped("SIGTERM")),
}


def fields_of(record: Any) -> dict[str, Any]:
    """What the run's state takes from a record."""
    return {"kind": record.kind, "nodes": record.nodes}


def launched(folder: Path, record: Any, *, step: int, attempts: int) -> list[int]:
    """Exit codes of `next_attempt` for so many attempts that end so, one after the other."""
    codes = []
    for attempt in range(attempts):
        run = RunFolder(folder, {"GRPO_JOB": "17", "GRPO_ATTEMPT": str(attempt)})
        run.update(state="failed", why=str(record), step=step, **fields_of(record))
        run.release()
        with contextlib.redirect_stdout(io.StringIO()):
            codes.append(next_attempt.main([str(folder), "--job", "17", "--attempt", str(attempt), "--failed"]))
    return codes


def what_follows(error: BaseException, folder: Path) -> dict[str, Any]:
    record = record_of(error, node=1, rank=8, host="b", phase="train")
    before = launched(folder / "before", record, step=0, attempts=1)
    behind = launched(folder / "behind", record, step=3, attempts=3)
    state = next_attempt.read_state(folder / "behind", lambda _: True)
    lost_nodes.probe = lambda nodes: set()
    reported = io.StringIO()
    with (
        contextlib.suppress(BaseException),
        contextlib.redirect_stderr(reported),
        reporting_mistakes(folder / "reported"),
    ):
        raise error
    recorded = next_attempt.read_state(folder / "reported", lambda _: True)
    return {
        "before": before,
        "behind": behind,
        "lost": lost_nodes.lost_nodes(state, NODES, used=2, here="a"),
        "asks for lost nodes": bool(lost_nodes.watch(10**7, lambda: state, lambda _: ["any"])),
        "reported": bool(reported.getvalue()),
        "recorded": recorded is not None,
        "symptoms": [symptom.id for symptom in matching([record.cause])],
        "text": record.cause,
    }


def main() -> None:
    found = {}
    for number, (name, act) in enumerate(WAYS.items()):
        folder = Path(sys.argv[1]) / str(number)
        folder.mkdir(parents=True)
        try:
            act(folder)
        except BaseException as error:  # noqa: BLE001  what is raised is what is looked at
            found[name] = what_follows(error, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
