"""A machine for the scripts in launch/: a stub in the place of `grpo`, and a few lines of shell in Slurm's."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.launching import ROOT, end_tree

LAUNCH = ROOT / "launch"
DONE, FAILED, START_AGAIN, INTERRUPTED = 0, 1, 85, 130

STUB = f'exec {sys.executable} -m tests.jobs.stub_launcher "$@"\n'

# As srun: one copy of the command per node, side by side; the highest exit code of all. It hands out GPUs only to steps
# that ask for them, and some time after the first has ended it ends the others: seconds here for the script's minutes.
# Nothing runs on the nodes that FAKE_LOST names, once a step has run on them.
SRUN = r"""
set -m # process groups
gpus= nodes=({0..9})
options=()
while [[ $1 == --* ]]; do
    options+=("$1")
    case $1 in
    --output=*) output=${1#*=} ;;
    --gpus=*) gpus=all ;;
    --gpus-per-node=*) gpus=${1#*=} ;;
    --nodes=*) count=${1#*=} ;;
    --nodelist=*) names=${1#*=,} names=${names#*=}; read -ra nodes <<<"${names//[n,]/ }" ;;
    --wait=*) patience_s=$((${1#*=} / 60)) ;;
    esac
    shift
done
if [[ $1 == true ]]; then
    echo "${nodes[0]}" >>"$FAKE/probed"
    [[ " ${FAKE_LOST:-} " != *" n${nodes[0]} "* ]]
    exit
fi
printf '%s\n' "${options[@]}" >>"$FAKE/srun_options"
read -ra per_node <<<"$FAKE_GPUS"
pids=()
for ((index = 0; index < count; index++)); do
    node=${nodes[index]}
    unset CUDA_VISIBLE_DEVICES
    case $gpus in
    '') ;;
    all) export CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((per_node[node] - 1))) ;;
    *) export CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((gpus - 1))) ;;
    esac
    SLURM_NODEID=$index SLURMD_NODENAME=n$node "$@" >"${output//%n/$index}" 2>&1 &
    pids+=($!)
done
status=0 killer=
for pid in "${pids[@]}"; do
    code=0
    wait -n "${pids[@]}" || code=$?
    ((code <= status)) || status=$code
    if [[ -z $killer ]]; then
        { /bin/sleep "$patience_s"; kill -KILL -- "${pids[@]/#/-}"; } 2>/dev/null &
        killer=$!
    fi
done
kill -- "-$killer"
exit $status
"""

SCONTROL = r"""
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
case "$1 $2 $3" in
"show job --details")
    echo "JobId=$4 JobName=grpo"
    node=0
    for count in $FAKE_GPUS; do
        echo "     Nodes=n$node CPU_IDs=0-3 Mem=0 GRES=gpu:h100:$count(IDX:0,2-$count),shard:3(0/3)"
        ((++node))
    done ;;
"show hostnames n[0-1]") printf '%s\n' n0 n1 ;;
"show hostnames n[0-2]") printf '%s\n' n0 n1 n2 ;;
"show hostnames n"?) echo "$3" ;;
"update JobId=$job "*) echo "$3" >>"$FAKE/shrunk" ;;
"show job $job") echo "   Command=/home/me/grpo/launch/train.sbatch --max_steps 5" ;;
"requeue $job ") echo requeue >>"$FAKE/requeued"; exit "${FAKE_REFUSES:-0}" ;;
*) echo "scontrol $*: not expected" >&2; exit 2 ;;
esac
"""

# The GPUs that a driver shows: none, or it hangs until the test lets it go on.
NVIDIA_SMI = """
[[ -n ${FAKE_SMI_WAITS:-} ]] || exit 9
mkdir -p "$FAKE/out"
touch "$FAKE/out/asking_for_gpus"
until [[ -e $FAKE/answer ]]; do /bin/sleep 0.02; done
"""

PROGRAMS = {
    "srun": SRUN,
    "scontrol": SCONTROL,
    "grpo": STUB,
    "python": f'exec {sys.executable} "$@"\n',
    "nvidia-smi": NVIDIA_SMI,
}


@dataclass
class Machine:
    """A folder with the programs that a script calls, and what they are reported."""

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

    def wait_for(self, name: str, text: str = "") -> None:
        """Until the output folder has this file, with this text in it."""
        path, deadline = self.output_dir / name, time.monotonic() + 60
        while not path.exists() or text not in path.read_text():
            assert time.monotonic() < deadline, f"no {name} with {text!r}"
            time.sleep(0.02)

    def end(self) -> None:
        """Kill what a failed test has left running."""
        for process in self.started:
            end_tree(process)

    def launched(self, node: int, attempt: int = 0) -> dict:
        return json.loads((self.output_dir / f"launched.{attempt}.{node}.json").read_text())

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def option(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1, f"{name} in {arguments}"
    return arguments[arguments.index(name) + 1]
