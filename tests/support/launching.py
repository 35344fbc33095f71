"""Starting jobs as users start them, and looking for what they leave behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.left_over import left_over, orphaned_shared_memory, processes_in, shared_memory_of

if TYPE_CHECKING:
    import psutil  # on a GPU machine with torch alone this file is read, but no job is started

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EXTENSIONS = "torch_extensions"  # of each job's own: on CPUs none builds any, which would take a minute and a compiler
ENGINES_CACHES = ROOT / "build" / "engines_caches"
LAUNCHED: list[Path] = []
"""Output folders of the jobs that the running test and its fixtures have started."""
TINY_JOB = ROOT / "tests" / "jobs" / "tiny_job.py"


def known_models(vllm_cache: Path) -> None:
    """Copy there what vLLM knows of models' classes; it starts a process to find it out, which takes 7 s of a core."""
    known = ENGINES_CACHES / "vllm" / "modelinfos"
    (vllm_cache / known.name).mkdir(parents=True, exist_ok=True)
    for record in known.glob("*.json"):
        shutil.copy(record, vllm_cache / known.name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def metrics_in(output_dir: Path) -> list[dict]:
    """The lines of logged training steps."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward" in line]


@dataclass
class Job:
    """A launched job: one launcher per node, all output in one log."""

    launchers: list[subprocess.Popen]
    log: Path
    output_dir: Path
    temporary: Path
    """Its folder for temporary files; short, for sockets live there."""
    orphans_before: set[str]
    started: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def fail(self, what: str) -> AssertionError:
        engines = "".join(
            f"\n--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.output_dir.glob("logs/*.log"))
            if path.is_file()  # and no pipe, which stands for a file that hangs
        )
        return AssertionError(f"{what}\n--- job\n{self.output()[-8000:]}{engines}")

    def wait(self, timeout_s: float) -> list[int]:
        """Exit codes of the launchers."""
        deadline = time.monotonic() + timeout_s
        try:
            return [launcher.wait(max(0.1, deadline - time.monotonic())) for launcher in self.launchers]
        except subprocess.TimeoutExpired:
            raise self.fail(f"the job still runs after {timeout_s} s") from None

    def wait_for(self, name: str, timeout_s: float) -> Path:
        """Until the job has written `output_dir/name`."""
        path = self.output_dir / name
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if any(launcher.poll() is not None for launcher in self.launchers):
                raise self.fail(f"the job ended before it wrote {name}")
            if time.monotonic() > deadline:
                raise self.fail(f"no {name} after {timeout_s} s")
            time.sleep(0.05)
        return path

    def rank(self, rank: int) -> dict:
        return json.loads((self.output_dir / "ranks" / f"{rank}.json").read_text())

    def metrics(self) -> list[dict]:
        return metrics_in(self.output_dir)

    def processes(self) -> list["psutil.Process"]:
        """Every process that the job has now, engines included."""
        import psutil

        found: dict[int, psutil.Process] = {}
        for launcher in self.launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(launcher.pid)
                for process in [parent, *parent.children(recursive=True)]:
                    found[process.pid] = process
        return list(found.values())

    def traces(self, patience_s: float = 15.0) -> set[str]:
        """What the job, which has ended, left: processes, temporary files of ours and of vLLM, shared memory."""
        return left_over(self.temporary, self.orphans_before, patience_s)

    def end(self, *, may_leave: bool = False) -> None:
        """Kill what still runs. A job that has ended by itself must have left nothing, unless a test fails already.

        Args:
            may_leave: what it left has been looked at.
        """
        has_ended = not may_leave and all(launcher.poll() is not None for launcher in self.launchers)
        left = self.traces() if has_ended and sys.exc_info()[0] is None else set()
        ended = {process.pid for process in self.processes()} | set(processes_in(self.temporary))
        memory = shared_memory_of(ended)
        for pid in ended:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        for path in memory:  # nobody else is there to do it, and other tests look
            path.unlink(missing_ok=True)
        for launcher in self.launchers:
            launcher.wait()
        built = list((self.temporary / EXTENSIONS).rglob("deepspeed_shm_comm*"))
        shutil.rmtree(self.temporary, ignore_errors=True)
        assert not left, self.fail(f"left behind: {left}")
        assert not built, self.fail("DeepSpeed has compiled what no training uses: leave_out_shared_memory_op")


def end_tree(process: subprocess.Popen) -> None:
    """Kill it and all that it has started, as far as they still run."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for each in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def start(
    command: Callable[[int], list[str]],
    output_dir: Path,
    *,
    nodes: int = 1,
    env: dict[str, str] | None = None,
) -> Job:
    """Start `command(node)` for each node, in a folder that is not the project's root."""
    output_dir.mkdir(parents=True, exist_ok=True)
    LAUNCHED.append(output_dir)
    log = output_dir / "job.log"
    temporary = Path(tempfile.mkdtemp(prefix="job-", dir="/tmp"))
    orphans_before = orphaned_shared_memory()
    with log.open("wb") as sink:
        launchers = [
            subprocess.Popen(
                command(node),
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=output_dir,
                env={
                    **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},  # conftest's
                    "PYTHONUNBUFFERED": "1",
                    "TMPDIR": str(temporary),
                    "TORCH_EXTENSIONS_DIR": str(temporary / EXTENSIONS),
                    **(env or {}),
                },
            )
            for node in range(nodes)
        ]
    return Job(launchers, log, output_dir, temporary, orphans_before)


def accelerate_command(
    script: list[str], *, ranks_per_node: int = 2, nodes: int = 1, port: int
) -> Callable[[int], list[str]]:
    """`accelerate launch --config_file configs/cpu.yaml …` for one of `nodes` nodes on this machine.

    By its other name, which does not import accelerate's other commands, transformers and half of torch among what
    they need: 3 s of a core.
    """

    def command(node: int) -> list[str]:
        flags = ["--config_file", str(ROOT / "configs" / "cpu.yaml"), "--main_process_port", str(port)]
        flags += ["--num_processes", str(ranks_per_node * nodes)]
        if nodes > 1:
            flags += ["--num_machines", str(nodes), "--machine_rank", str(node), "--main_process_ip", "127.0.0.1"]
            flags += ["--deepspeed_multinode_launcher", "standard"]
        return [str(BIN / "accelerate-launch"), *flags, *script]

    return command


def torchrun_command(script: list[str], *, ranks: int = 2) -> list[str]:
    """One node by torchrun: DDP, or what `--deepspeed` in the script's own arguments says."""
    flags = [f"--nproc_per_node={ranks}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    return [str(BIN / "torchrun"), *flags, *script]


def tiny_job_script(
    model: Path, output_dir: Path, *, config: dict | None = None, hold: str = "", as_object: bool = False, **more: Any
) -> list[str]:
    """The script and argument that run `tests/jobs/tiny_job.py` with these settings."""
    output_dir.mkdir(parents=True, exist_ok=True)
    settings = output_dir / "settings.json"
    config = {"output_dir": str(output_dir), **(config or {})}
    said = {"model": str(model), "hold": hold, "as_object": as_object, "config": config, **more}
    settings.write_text(json.dumps(said))
    return [str(TINY_JOB), str(settings)]


def start_tiny_job(
    model: Path,
    output_dir: Path,
    *,
    config: dict | None = None,
    hold: str = "",
    nodes: int = 1,
    ranks_per_node: int = 2,
    env: dict[str, str] | None = None,
    **more: Any,
) -> Job:
    """`tests/jobs/tiny_job.py` on real ranks with real engines, by accelerate with configs/cpu.yaml."""
    script = tiny_job_script(model, output_dir, config=config, hold=hold, **more)
    command = accelerate_command(script, nodes=nodes, ranks_per_node=ranks_per_node, port=free_port())
    return start(command, output_dir, nodes=nodes, env=env)


def start_tiny_job_by_torchrun(
    model: Path,
    output_dir: Path,
    *,
    config: dict | None = None,
    hold: str = "",
    zero3: bool = True,
    env: dict[str, str] | None = None,
    **more: Any,
) -> Job:
    """The same by torchrun, with configs/zero3.json or as plain DDP."""
    deepspeed = {"deepspeed": str(ROOT / "configs" / "zero3.json")} if zero3 else {}
    script = tiny_job_script(model, output_dir, config={**deepspeed, **(config or {})}, hold=hold, **more)
    return start(lambda _: torchrun_command(script), output_dir, env=env)


def wait_gone(processes: list["psutil.Process"], timeout_s: float) -> list["psutil.Process"]:
    """Which of `processes` still run when the time is up."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
