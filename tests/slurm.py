"""A private Slurm cluster of several nodes on this machine, from the distribution's packages.

It has its own configuration, munge key, ports and spool folder, so that it neither sees nor disturbs a cluster that the
machine belongs to. `python -m tests.slurm install` installs the packages if GRPO_TEST_SLURM=install allows it, and
`python -m tests.slurm report` says in one line what was not tested without them: `make test` calls both.
"""

import contextlib
import getpass
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from tests.support import debian
from tests.support.launching import free_port
from tests.support.left_over import shared_memory_of

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
SEARCH_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # daemons are not on everybody's PATH
START_S, STOP_S = 30.0, 20.0

JOBS = 64  # of one cluster, at most

SLURM_CONF = """\
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired: two minutes by default.
AuthInfo=cred_expire=5,socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
JobRequeue=1
GresTypes=gpu
{nodes}
{partitions}
"""

T = TypeVar("T")


class Slurm:
    """A running cluster; `stop` it.

    Args:
        partitions: the nodes of each partition, by name, with the number of their fake GPUs.
    """

    def __init__(self, partitions: Mapping[str, Mapping[str, int]]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: sockets live there
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": SEARCH_PATH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen] = []
        self._configure({name: gpus for nodes in partitions.values() for name, gpus in nodes.items()}, partitions)
        try:
            self._start([name for nodes in partitions.values() for name in nodes])
        except BaseException:
            self.stop()
            raise

    def _configure(self, nodes: Mapping[str, int], partitions: Mapping[str, Mapping[str, int]]) -> None:
        host = socket.gethostname().partition(".")[0]
        gres = ""
        for name, gpus in nodes.items():
            devices = self.folder / "devices" / name
            devices.mkdir(parents=True)
            for index in range(gpus):
                os.mknod(devices / f"nvidia{index}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
            if gpus:
                gres += f"NodeName={name} Name=gpu File={devices}/nvidia[0-{gpus - 1}]\n"
        (self.folder / "gres.conf").write_text(gres)
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                # Ports follow from it; another cluster may be running beside, of a process with the next number.
                first_job=JOBS * (os.getpid() % 300 + 1),
                host=host,
                port=free_port(),
                user=getpass.getuser(),
                folder=self.folder,
                nodes="\n".join(
                    f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4"
                    + (f" Gres=gpu:{gpus}" if gpus else "")
                    for name, gpus in nodes.items()
                ),
                partitions="\n".join(
                    f"PartitionName={name} Nodes={','.join(members)} MaxTime=INFINITE State=UP"
                    for name, members in partitions.items()
                ),
            )
        )
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start(self, nodes: list[str]) -> None:
        munge = {name: self.folder / f"munge.{name}" for name in ("socket", "key", "pid", "log", "seed")}
        files = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in munge.items()]
        self._daemon("munged", "--foreground", "--force", "--num-threads=1", *files)
        self.wait_until(munge["socket"].exists, START_S, "munged opens no socket")
        self._daemon("slurmctld", "-D")
        for name in nodes:
            self._daemon("slurmd", "-D", "-N", name)

        def all_idle() -> bool:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%t", check=False).split()
            return states == ["idle"] * len(nodes)

        self.wait_until(all_idle, START_S, "the nodes do not come up")

    def _daemon(self, program: str, *arguments: str) -> None:
        """In the foreground, so that its pid is known, and ended by the kernel if this process dies before it."""
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", program, *arguments],
                    env=self.env,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def run(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Output of one of Slurm's commands against this cluster."""
        done = subprocess.run(command, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise AssertionError(f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """`sbatch …`; the job's id."""
        return self.run("sbatch", "--parsable", *command, env=env).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        return dict(re.findall(r"(\w[\w/:]*)=(\S*)", self.run("scontrol", "show", "job", "-o", job)))

    def wait_until(self, happened: Callable[[], T], timeout_s: float, otherwise: str) -> T:
        """The first true value of `happened()`; it is an error with the cluster's logs when none comes in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := happened()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{otherwise} (waited {timeout_s:g} s)\n{self.logs()}")
            time.sleep(0.1)
        return value

    def wait_for_state(self, job: str, states: set[str], timeout_s: float) -> dict[str, str]:
        """Until the job is in one of `states`."""
        seen = {}

        def reached() -> bool:
            seen.update(self.job(job))
            return seen["JobState"] in states

        self.wait_until(reached, timeout_s, f"job {job} does not become {' or '.join(sorted(states))}")
        return seen

    def processes_on(self, node: str) -> list[psutil.Process]:
        """Those of a job on this node, their own children with them, and Slurm's there."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                is_daemon = process.name() == "slurmd" and node in process.cmdline()
                if not is_daemon and process.environ().get("SLURMD_NODENAME") != node:
                    continue
                parent = process.parent()
                family = [process, *process.children(recursive=True)]
                family += [parent] if parent and parent.name().startswith("slurmstepd") else []
                found |= {each.pid: each for each in family}
        return [*found.values()]

    def lose(self, node: str, *, is_cut: bool = False) -> None:
        """End all that runs on a node, and say so to nobody; or only stop it, so that its connections stay.

        Until `revive`.
        """
        processes = self.processes_on(node)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        if not is_cut:
            self._power_off(processes)

    def _power_off(self, processes: Sequence[psutil.Process]) -> None:
        """They end, and the node's memory with them."""
        memory = shared_memory_of(process.pid for process in processes)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=STOP_S)
        for path in memory:  # a node's processes share none with another's
            path.unlink(missing_ok=True)

    def revive(self, node: str) -> None:
        """A node that was lost takes jobs again."""
        self._power_off(self.processes_on(node))
        self._daemon("slurmd", "-D", "-N", node)
        self.wait_until(lambda: self._state(node) == "idle", START_S, f"{node} does not come back")

    def _state(self, node: str) -> str:
        return self.run("sinfo", "--noheader", "--Node", "--format=%t", f"--nodes={node}", check=False).strip()

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        """End every job, step and daemon of this cluster, and remove its folder."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user", getpass.getuser(), check=False)
            self.wait_until(lambda: not self.run("squeue", "--noheader", check=False).strip(), STOP_S, "jobs stay")
        for daemon in reversed(self._daemons):  # munged last: the others sign what they say to each other
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(STOP_S)
            daemon.kill()
            daemon.wait()
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs with this cluster's configuration, jobs included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    found.append(process)
        return found


@contextlib.contextmanager
def cluster(partitions: Mapping[str, Mapping[str, int]]) -> Iterator[Slurm]:
    """A cluster for the length of a `with` block."""
    slurm = Slurm(partitions)
    try:
        yield slurm
    finally:
        slurm.stop()


def missing() -> list[str]:
    """Slurm's programs that this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program, path=SEARCH_PATH) is None]


def why_not() -> str:
    """Why there can be no cluster here, and what to do about it; empty if there can."""
    if missing():
        return (
            f"Slurm is not installed ({missing()[0]} is missing): apt-get install --no-install-recommends "
            f"{' '.join(PACKAGES)}, or let `GRPO_TEST_SLURM=install make test` do it"
        )
    return "" if os.geteuid() == 0 else "the fake GPUs of the test cluster need root (mknod)"


def install() -> None:
    """Install what is missing, if GRPO_TEST_SLURM=install."""
    if debian.is_promised("GRPO_TEST_SLURM") and missing():
        debian.install(PACKAGES)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["report"]:
            if reason := why_not():
                print(f"NOT TESTED: launch/ on a real Slurm cluster: {reason}")
        case _:
            sys.exit("python -m tests.slurm install | report")
