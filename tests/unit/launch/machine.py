"""A machine for the scripts in launch/: a stub in the launcher's place, and a few lines of shell in Slurm's."""

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.launching import ROOT

LAUNCH = ROOT / "launch"
DONE, FAILED, START_AGAIN = 0, 1, 85

STUB = f'exec {sys.executable} {ROOT}/tests/jobs/stub_launcher.py "$(basename "$0")" "$@"\n'

# As srun: one copy of the command per node, side by side. It hands out GPUs only to steps that ask for them, and ends
# the others when one fails if it is told to.
SRUN = r"""
set -m # process groups
output=/dev/stdout gpus= ends=
while [[ $1 == --* ]]; do
    echo "$1" >>"$FAKE/srun_options"
    case $1 in
    --output=*) output=${1#*=} ;;
    --gpus=*) gpus=${1#*=} ;;
    --kill-on-bad-exit=1) ends=yes ;;
    esac
    shift
done
read -ra per_node <<<"$FAKE_GPUS"
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do
    unset CUDA_VISIBLE_DEVICES
    [[ -z $gpus ]] || export CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((per_node[node] - 1)))
    if [[ $output == /dev/stdout ]]; then
        SLURM_NODEID=$node SLURMD_NODENAME=n$node "$@" &
    else
        SLURM_NODEID=$node SLURMD_NODENAME=n$node "$@" >"${output//%n/$node}" 2>&1 &
    fi
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    wait -n || { status=$?; [[ -z $ends ]] || kill -KILL -- "${pids[@]/#/-}" 2>/dev/null; }
done
exit $status
"""

SCONTROL = r"""
case "$1 $2 $3" in
"show hostnames "*) for ((node = 0; node < SLURM_NNODES; node++)); do echo "n$node"; done ;;
"show node n0") echo "NodeName=n0 Arch=x86_64"; echo "   NodeAddr=192.0.2.7 NodeHostName=n0 Version=1" ;;
"show job --details")
    total=0; for count in $FAKE_GPUS; do ((total += count)) || true; done
    echo "JobId=$4 JobName=grpo"; ((total == 0)) || echo "   JOB_GRES=gpu:h100:$total,shard:3" ;;
"show job $SLURM_JOB_ID") echo "   Command=/home/me/grpo/launch/train.sbatch --max_steps 5" ;;
"requeue $SLURM_JOB_ID ") echo requeue >>"$FAKE/requeued"; exit "${FAKE_REFUSES:-0}" ;;
*) echo "scontrol $*: not expected" >&2; exit 2 ;;
esac
"""

# What torch says is made up, because it takes seconds to load, unless a test wants the real one.
PYTHON = f"""
if [[ "$*" == "-m grpo.job.devices"* && -z ${{REAL_TORCH:-}} ]]; then
    if [[ ${{FAKE_TORCH:-}} == waits ]]; then
        touch "$FAKE/out/asking_torch"
        until [[ -e $FAKE/torch_answers ]]; do /bin/sleep 0.02; done
    fi
    echo "${{FAKE_TORCH:-0}}"
else
    exec {sys.executable} "$@"
fi
"""

PROGRAMS = {
    "srun": SRUN,
    "scontrol": SCONTROL,
    "grpo": """
echo "$*" >>"$FAKE/doctor"
if [[ ${FAKE_DOCTOR:-0} == waits ]]; then
    trap 'exit 143' TERM
    touch "$FAKE/out/examining"
    while :; do /bin/sleep 0.05; done
fi
exit "${FAKE_DOCTOR:-0}"
""",
    "accelerate": STUB,
    "torchrun": STUB,
    "python": PYTHON,
    "sleep": "exec /bin/sleep 0.1",
    "nvidia-smi": 'exit "${FAKE_SMI:-9}"',
    # Names of nodes do not resolve, those of pods do.
    "getent": '[[ $2 == *.* ]] && echo "$2" >>"$FAKE/resolved"',
}


@dataclass
class Machine:
    """A folder with the programs that a script calls, and what they are told."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen] = field(default_factory=list)

    @property
    def output_dir(self) -> Path:
        return self.folder / "out"

    def behave(self, *behaviour: str) -> None:
        """What the stub does in attempt 0, 1, ..."""
        self.output_dir.mkdir(exist_ok=True)
        (self.output_dir / "behaviour.json").write_text(json.dumps(behaviour))

    def start(self, script: str, *arguments: str, **env: str) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", str(LAUNCH / script), *arguments],
            cwd=ROOT,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, script: str, *arguments: str, **env: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(script, *arguments, **env)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def wait_for(self, name: str) -> Path:
        deadline = time.monotonic() + 30
        while not (path := self.output_dir / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)
        return path

    def end(self) -> None:
        """Kill what a failed test has left running."""
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(process.pid)
                for running in [*parent.children(recursive=True), parent]:
                    running.kill()
            process.wait()

    def launched(self, node: int, attempt: int = 0) -> dict:
        return json.loads((self.output_dir / f"launched.{attempt}.{node}.json").read_text())

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def option(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1, f"{name} in {arguments}"
    return arguments[arguments.index(name) + 1]
