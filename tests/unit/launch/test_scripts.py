"""What the scripts in launch/ do, with a stub in the launcher's place and a few lines of shell in Slurm's."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import kubernetes_validate
import psutil
import pytest
import yaml

from tests.launching import ROOT

LAUNCH = ROOT / "launch"
TEMPLATES = ("train.sbatch", "train_torchrun.sbatch")
SCRIPTS = (*TEMPLATES, "slurm_job.sh", "local_2node.sh", "k8s/node.sh")
LAUNCHER = {"train.sbatch": "accelerate", "train_torchrun.sbatch": "torchrun"}
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
    echo "$*" >>"$FAKE/asked_torch"
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


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text("#!/usr/bin/env bash\n" + body)
        (programs / name).chmod(0o755)
    (tmp_path / "environment").write_text("")
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "FAKE": str(tmp_path),
        "FAKE_GPUS": "8 8",
        "VIRTUAL_ENV": "one is active",
        "GRPO_ENVIRONMENT": str(tmp_path / "environment"),
        "GRPO_OUTPUT_DIR": str(tmp_path / "out"),
        "SLURM_JOB_ID": "123456",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_CPUS_PER_NODE": "192(x3),96,128",
    }
    machine = Machine(tmp_path, env)
    yield machine
    machine.end()


def option(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1, f"{name} in {arguments}"
    return arguments[arguments.index(name) + 1]


# ---- all of them ----------------------------------------------------------------------------------------------------


def test_every_script_is_tested() -> None:
    files = {str(path.relative_to(LAUNCH)) for path in LAUNCH.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files == {*SCRIPTS, "next_attempt.py", "k8s/job.yaml"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_it(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(LAUNCH / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [*TEMPLATES, "local_2node.sh", "k8s/job.yaml"])
def test_its_top_says_how_to_start_follow_and_stop(name: str) -> None:
    comment = re.split(r"^(?:[^#\n]|#SBATCH|$)", (LAUNCH / name).read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    assert re.findall(r"^# (start|follow|stop) ", comment, re.MULTILINE) == ["start", "follow", "stop"]
    assert name in comment, "how to start it names the file"


# ---- the Slurm templates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", TEMPLATES)
def test_slurm_reads_the_header(template: str) -> None:
    header = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", (LAUNCH / template).read_text(), re.MULTILINE)
    options = dict(header)
    assert len(options) == len(header)
    assert "$" not in "".join(options.values()), "Slurm expands nothing in these lines"
    assert {"nodes", "time", "partition", "exclusive", "requeue"} <= options.keys()
    assert (options["mem"], options["open-mode"], options["ntasks-per-node"]) == ("0", "append", "1")
    assert options["signal"].startswith("B:USR1@")
    assert not {"gres", "gpus", "gpus-per-node"} & options.keys()
    first_command = re.search(r"^[^#\n]", (LAUNCH / template).read_text(), re.MULTILINE)
    assert first_command is not None
    assert "#SBATCH" not in (LAUNCH / template).read_text()[first_command.start() :], "Slurm reads no line below"


def test_the_templates_differ_in_the_launcher_alone() -> None:
    def rest(template: str) -> str:
        text = (LAUNCH / template).read_text()
        text = text[: text.index("train_on_each_node")] + text[text.index("finish_attempt") :]
        text = text.replace(template, "TEMPLATE").replace("`accelerate launch`", "`torchrun`")
        return re.sub(r" +", " ", re.sub(r"^config_file=.*\n", "", text, flags=re.MULTILINE))

    assert rest("train.sbatch") == rest("train_torchrun.sbatch")


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_the_ranks_are_given(template: str, machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run(template, "--run_name", "two words", "--max_steps=5", FAKE_GPUS="8 7")
    assert code == DONE, output
    # 7 GPUs on the smaller node, of which one is reserved: 6 ranks on both.
    for node in (0, 1):
        launched = machine.launched(node)
        arguments = launched["arguments"]
        assert launched["name"] == LAUNCHER[template]
        if template == "train.sbatch":
            assert arguments[0] == "launch"
            flags = ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port")
            assert [option(arguments, f"--{flag}") for flag in flags] == ["2", "12", str(node), "192.0.2.7", "13456"]
            assert option(arguments, "--deepspeed_multinode_launcher") == "standard"
            assert (ROOT / option(arguments, "--config_file")).exists()
        else:
            flags = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port")
            assert [option(arguments, f"--{flag}") for flag in flags] == ["2", "6", str(node), "192.0.2.7", "13456"]
            assert (ROOT / option(arguments, "--deepspeed")).exists()
        script = arguments[arguments.index("train.py") :]
        assert option(script, "--resume") == "auto"
        assert option(script, "--output_dir") == str(machine.output_dir)
        assert [word for word in script if "two words" in word or "max_steps" in word] == ["two words", "--max_steps=5"]
        assert launched["usr1"] == "ignored"
        environment = launched["environment"]
        assert (environment["GRPO_JOB"], environment["GRPO_ATTEMPT"]) == ("123456", "0")
        assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"
        assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(8 - node)))
        log = machine.output_dir / "logs" / f"train-node{node}.job-123456.attempt-0.log"
        assert log.read_text() == f"{LAUNCHER[template]} on node {node}, attempt 0\n"
    config_file = "configs/4node.yaml" if template == "train.sbatch" else "configs/zero3.json"
    assert (
        machine.lines("doctor")
        == [
            f"doctor --head 192.0.2.7 --port 13456 --output-dir {machine.output_dir} --config_file {config_file} "
            "-- --run_name two words --max_steps=5"
        ]
        * 2
    )
    options = set(machine.lines("srun_options"))
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=96", "--gpus=15"} <= options


@pytest.mark.parametrize(("ranks", "processes"), [("1", "2"), ("3", "6")])
def test_ranks_of_nodes_without_gpus(ranks: str, processes: str, machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run("train.sbatch", FAKE_GPUS="", GRPO_RANKS_PER_CPU_NODE=ranks)
    assert code == DONE, output
    assert option(machine.launched(1)["arguments"], "--num_processes") == processes
    assert not [line for line in machine.lines("srun_options") if line.startswith("--gpus")]


# A torch that is built for GPUs and sees none.
BUILT_FOR_GPUS = """
import sys
if "grpo.job.devices" in sys.orig_argv:
    import torch
    torch.version.cuda = "12.9"
"""


@pytest.fixture
def built_for_gpus(machine: Machine) -> Machine:
    site = machine.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BUILT_FOR_GPUS)
    machine.env |= {"REAL_TORCH": "yes", "PYTHONPATH": f"{site}:{ROOT}"}
    return machine


def test_a_slurm_that_gives_gpus_only_to_those_who_ask(built_for_gpus: Machine) -> None:
    machine = built_for_gpus
    machine.behave("finish")
    code, output = machine.run("train.sbatch", FAKE_GPUS="")
    assert code == FAILED
    assert output.count("torch is built for CUDA 12.9, but sees no GPU (CUDA_VISIBLE_DEVICES is unset)") == 2, output
    assert "--gres=gpu:8" in output.splitlines()[-1]
    assert not machine.lines("doctor")
    assert not list(machine.output_dir.glob("launched*"))
    code, output = machine.run("train.sbatch", "--use_cpu", FAKE_GPUS="")
    assert code == DONE, output
    assert option(machine.launched(1)["arguments"], "--num_processes") == "2"


def test_two_local_nodes_whose_gpus_are_hidden(built_for_gpus: Machine) -> None:
    machine = built_for_gpus
    machine.behave("finish")
    code, output = machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    assert (code, "sees no GPU (CUDA_VISIBLE_DEVICES='')" in output) == (FAILED, True), output
    code, output = machine.run("local_2node.sh", "--use_cpu", CUDA_VISIBLE_DEVICES="")
    assert code == DONE, output


def test_a_pod_whose_gpus_are_missing(built_for_gpus: Machine, pod: Machine) -> None:
    code, output = pod.run("k8s/node.sh", JOB_COMPLETION_INDEX="0")
    assert (code, "sees no GPU" in output, "nvidia.com/gpu: 8" in output) == (FAILED, True, True), output
    assert not pod.lines("doctor")


def test_gpus_without_their_driver_s_program_are_counted_by_torch(machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run("train.sbatch", FAKE_GPUS="", FAKE_TORCH="8")
    assert code == DONE, output
    assert option(machine.launched(1)["arguments"], "--num_processes") == "14"


@pytest.mark.parametrize(
    ("gpus", "arguments", "behaviour", "env", "said"),
    [
        pytest.param("8 1", [], "finish", {}, "n1 sees 1 GPUs (n0 sees 8): too few", id="too-few-gpus"),
        pytest.param("8 8", [], "finish", {"GRPO_RESERVED_GPUS": "8"}, "beside 8 reserved ones", id="all-reserved"),
        pytest.param("8 8", ["--output_dir=x"], "finish", {}, "GRPO_OUTPUT_DIR instead", id="output-dir-elsewhere"),
        pytest.param("8 8", [], "finish", {"FAKE_DOCTOR": "1"}, "grpo doctor found nodes", id="doctor-says-no"),
    ],
)
def test_what_keeps_a_job_from_starting(
    gpus: str, arguments: list[str], behaviour: str, env: dict[str, str], said: str, machine: Machine
) -> None:
    machine.behave(behaviour)
    code, output = machine.run("train.sbatch", *arguments, FAKE_GPUS=gpus, **env)
    assert (code, said in output) == (FAILED, True), output
    assert not list(machine.output_dir.glob("launched*"))
    assert not machine.lines("requeued")


# behaviour of each attempt -> exit code of the last one, how often the job was requeued, what it says
ENDS = {
    "finished": (["finish"], DONE, 0, "training has finished"),
    "cannot-heal": (["hopeless"], FAILED, 0, "starting again would not help: 28 training processes were asked for"),
    "three-crashes": (["heal", "vanish", "lopsided"], FAILED, 2, "crash 3 of 3 in a row"),
    "crashes-with-progress": (["progress", "progress", "progress", "vanish", "finish"], DONE, 4, "has finished"),
    "progress-starts-the-count-again": (
        ["vanish", "vanish", "progress", "vanish", "vanish", "vanish"],
        FAILED,
        5,
        "crash 3 of 3",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_attempts_end(case: str, machine: Machine) -> None:
    behaviours, expected_code, requeues, said = ENDS[case]
    machine.behave(*behaviours)
    for attempt in range(len(behaviours)):
        assert len(machine.lines("requeued")) == attempt
        restarts = {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
        code, output = machine.run("train.sbatch", **restarts)
    assert (code, said in output) == (expected_code, True), output
    assert len(machine.lines("requeued")) == requeues
    assert all((machine.output_dir / f"launched.{attempt}.1.json").exists() for attempt in range(len(behaviours)))


def test_the_signal_before_the_time_is_up(machine: Machine) -> None:
    machine.behave("wait")
    job = machine.start("train.sbatch")
    machine.wait_for("launched.0.1.json")
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == DONE, output
    assert "stopped after step 3 to go on later" in output
    assert machine.lines("requeued") == ["requeue"]
    assert not list(machine.output_dir.glob("stop*")), "answered"


def test_a_person_stops_the_job(machine: Machine) -> None:
    machine.behave("wait", "finish")
    job = machine.start("train.sbatch")
    machine.wait_for("launched.0.1.json")
    (machine.output_dir / "stop").touch()
    output, _ = job.communicate(timeout=30)
    assert (job.returncode, machine.lines("requeued")) == (DONE, []), output
    # ... or while it waits in the queue.
    code, output = machine.run("train.sbatch", SLURM_RESTART_COUNT="1")
    assert (code, "not training" in output) == (DONE, True), output
    assert not (machine.output_dir / "launched.1.0.json").exists()
    assert not (machine.output_dir / "stop").exists()


def test_where_slurm_does_not_requeue_it_prints_the_command(machine: Machine) -> None:
    machine.behave("vanish")
    code, output = machine.run("train.sbatch", FAKE_REFUSES="1")
    assert code == START_AGAIN
    command = f"GRPO_OUTPUT_DIR={machine.output_dir} sbatch /home/me/grpo/launch/train.sbatch --max_steps 5"
    assert output.rstrip().endswith(command), output


# ---- two nodes on one machine ---------------------------------------------------------------------------------------


def test_local_nodes_share_the_gpus(machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run("local_2node.sh", "--run_name", "two words", CUDA_VISIBLE_DEVICES="7,6,5,4,3,2,1")
    assert code == DONE, output
    for node, devices in enumerate(("7,6,5", "4,3,2")):
        launched = machine.launched(node)
        assert launched["environment"]["CUDA_VISIBLE_DEVICES"] == devices
        flags = ("num_machines", "num_processes", "machine_rank", "main_process_ip")
        assert [option(launched["arguments"], f"--{flag}") for flag in flags] == ["2", "4", str(node), "127.0.0.1"]
        assert option(launched["arguments"], "--config_file") == "configs/4node.yaml"
        assert "two words" in launched["arguments"]
        assert (machine.output_dir / "logs" / f"train-node{node}.attempt-0.log").exists()


def test_local_nodes_without_gpus(machine: Machine) -> None:
    machine.behave("finish", "finish")
    for attempt, ranks in enumerate(("1", "2")):
        code, output = machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="", GRPO_RANKS_PER_CPU_NODE=ranks)
        assert code == DONE, output
        arguments = machine.launched(1, attempt)["arguments"]
        assert option(arguments, "--num_processes") == str(2 * int(ranks))
        assert option(arguments, "--config_file") == "configs/cpu.yaml"


def test_too_few_local_gpus(machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="0,1,2")
    assert (code, "3 GPUs are too few" in output) == (FAILED, True), output


def test_interrupting_local_nodes_asks_for_a_checkpoint(machine: Machine) -> None:
    machine.behave("wait", "finish")
    job = machine.start("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    machine.wait_for("launched.0.0.json")
    machine.wait_for("launched.0.1.json")
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=30)
    assert (job.returncode, "to go on later" in output) == (START_AGAIN, True), output
    assert machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")[0] == DONE, "the same command goes on"


def test_a_local_node_that_fails_ends_the_other(machine: Machine) -> None:
    machine.behave("lopsided")
    code, output = machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    assert code == START_AGAIN, output
    assert "stopped after step 3" in output or "died without a word" in output


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pod(machine: Machine) -> Machine:
    machine.env |= {"NODES": "2", "JOB_NAME": "grpo", "JOB_UID": "u-1", "GRPO_STATE_WAIT_S": "2"}
    return machine


def run_pods(pod: Machine, attempt: int = 0) -> list[int]:
    """Exit codes of both pods of one attempt."""
    head = pod.start("k8s/node.sh", "--max_steps", "5", JOB_COMPLETION_INDEX="0")
    pod.wait_for(f"launched.{attempt}.0.json")  # the stub, unlike the trainer, wants to know the attempt on all nodes
    other = pod.start("k8s/node.sh", "--max_steps", "5", JOB_COMPLETION_INDEX="1")
    print(*(process.communicate(timeout=60)[0] for process in (head, other)))
    return [head.returncode, other.returncode]


def test_pods_run_one_node_each(pod: Machine) -> None:
    pod.behave("finish")
    assert run_pods(pod) == [DONE, DONE]
    for index in (0, 1):
        arguments = pod.launched(index)["arguments"]
        flags = ("num_machines", "num_processes", "machine_rank", "main_process_ip")
        assert [option(arguments, f"--{flag}") for flag in flags] == ["2", "2", str(index), "grpo-0.grpo"]
        assert option(arguments, "--max_steps") == "5"
    assert set(pod.lines("resolved")) == {"grpo-0.grpo", "grpo-1.grpo"}
    assert sorted(pod.lines("doctor")) == [
        f"doctor --nodes grpo-0.grpo,grpo-1.grpo --node-rank {index} --port 29500 --output-dir {pod.output_dir} "
        "--config_file configs/4node.yaml -- --max_steps 5"
        for index in (0, 1)
    ]


def test_ranks_of_pods_with_gpus(pod: Machine) -> None:
    pod.behave("finish")
    pod.env |= {"FAKE_TORCH": "8"}
    assert run_pods(pod) == [DONE, DONE]
    assert option(pod.launched(1)["arguments"], "--num_processes") == "14"
    code, output = pod.run("k8s/node.sh", JOB_COMPLETION_INDEX="0", GRPO_RESERVED_GPUS="8")
    assert (code, "8 GPUs are too few" in output) == (FAILED, True), output


def test_what_the_doctor_finds_counts_as_a_crash(pod: Machine) -> None:
    """It may be a pod that was drained meanwhile, or a node that the next pod does not come to: but not for ever."""
    pod.behave("finish")
    for attempt, expected in enumerate([START_AGAIN, START_AGAIN, FAILED]):
        code, output = pod.run("k8s/node.sh", JOB_COMPLETION_INDEX="0", FAKE_DOCTOR="1")
        assert (code, "grpo doctor found pods that cannot train" in output) == (expected, True), output
        assert f"crash {attempt + 1} of 3" in output
    assert pod.run("k8s/node.sh", JOB_COMPLETION_INDEX="1", FAKE_DOCTOR="1")[0] == START_AGAIN, "pod 0 counts"
    assert not list(pod.output_dir.glob("launched*"))


def test_a_pod_that_has_to_go_while_the_doctor_runs(pod: Machine) -> None:
    pod.behave("finish")
    waiting = pod.start("k8s/node.sh", JOB_COMPLETION_INDEX="0", FAKE_DOCTOR="waits")
    pod.wait_for("examining")
    waiting.send_signal(signal.SIGTERM)
    output, _ = waiting.communicate(timeout=30)
    assert waiting.returncode == START_AGAIN, output
    assert not pod.lines("launched.0.0.json")
    assert not list(pod.output_dir.glob("crashes*")), "it is no crash"


@pytest.mark.parametrize(
    ("behaviours", "codes"),
    [
        pytest.param(["hopeless"], [FAILED, FAILED], id="cannot-heal"),
        pytest.param(["heal", "finish"], [DONE, DONE], id="heals"),
        pytest.param(["vanish", "vanish", "vanish"], [FAILED, START_AGAIN], id="pod-0-counts-the-crashes"),
    ],
)
def test_how_attempts_of_pods_end(behaviours: list[str], codes: list[int], pod: Machine) -> None:
    pod.behave(*behaviours)
    last = len(behaviours) - 1
    for attempt in range(last):
        assert run_pods(pod, attempt) == [START_AGAIN, START_AGAIN]
    assert run_pods(pod, last) == codes


def test_a_pod_that_has_to_go_has_its_ranks_checkpoint(pod: Machine) -> None:
    pod.behave("wait")
    pods = [pod.start("k8s/node.sh", JOB_COMPLETION_INDEX=str(index)) for index in (0, 1)]
    for index, process in enumerate(pods):  # the trainer's ranks would tell each other; the stubs are told one by one
        pod.wait_for(f"launched.0.{index}.json")
        process.send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=30)[0] for process in pods]
    assert [process.returncode for process in pods] == [START_AGAIN, START_AGAIN]
    assert all("stopped after step 3 to go on later" in output for output in outputs), outputs


def test_a_pod_waits_for_what_rank_0_has_to_say(pod: Machine) -> None:
    pod.output_dir.mkdir()
    state = {"job": "u-1", "attempt": 2, "step": 3, "why": "", "requeue": False, "can_heal": True}
    (pod.output_dir / "run_state.json").write_text(json.dumps({**state, "state": "running"}))
    program = [sys.executable, str(LAUNCH / "next_attempt.py"), str(pod.output_dir), "--job", "u-1", "--attempt", "2"]
    assert subprocess.run([*program, "--follow", "--wait_s", "0.1"], check=False).returncode == START_AGAIN
    waiting = subprocess.Popen([*program, "--follow", "--wait_s", "30"])
    time.sleep(0.2)
    (pod.output_dir / "run_state.json").write_text(json.dumps({**state, "state": "finished"}))
    assert waiting.wait(30) == DONE


def test_a_pod_may_have_to_go_before_the_others_have_come(pod: Machine) -> None:
    pod.behave("finish")
    (pod.folder / "bin" / "getent").write_text("#!/bin/sh\nexit 2\n")
    waiting = pod.start("k8s/node.sh", JOB_COMPLETION_INDEX="1")
    assert waiting.stdout is not None
    assert "waiting for pod 0" in waiting.stdout.readline()
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(30) == START_AGAIN
    assert not list(pod.output_dir.glob("launched*"))


def test_the_manifest() -> None:
    service, job = list(yaml.safe_load_all((LAUNCH / "k8s" / "job.yaml").read_text()))
    for manifest in (service, job):
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    spec, template = job["spec"], job["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(values["NODES"])
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert job["metadata"]["name"] == service["metadata"]["name"] == pod["subdomain"], "pod k is NAME-k.NAME"
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > int(values["GRPO_STOP_S"])
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] in (7, 8)
    assert [name for name in resources["limits"] if name.startswith("rdma/")], "NCCL goes over TCP without"
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert resources["requests"].keys() == {"cpu", "memory"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert (ROOT / container["command"][-1]).exists()
    assert (ROOT / container["args"][1]).exists()
    rules = spec["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container["name"]}
    by_code = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert by_code == {START_AGAIN: "Ignore", FAILED: "FailJob"}
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]} in rules


REMOVABLE = {
    "add: [IPC_LOCK]": ["securityContext"],
    "rdma/hca_shared_devices_a: 1": ["resources", "limits", "rdma/hca_shared_devices_a"],
    "cpu: 64": ["resources", "requests", "cpu"],
    "memory: 512Gi": ["resources", "requests", "memory"],
}


@pytest.mark.parametrize("line", REMOVABLE)
def test_what_the_manifest_asks_for_is_explained_and_can_go(line: str) -> None:
    text = (LAUNCH / "k8s" / "job.yaml").read_text()
    lines = [each.strip() for each in text.splitlines()]
    at = lines.index(line)
    comment = list(itertools.takewhile(lambda each: each.startswith("#"), reversed(lines[:at])))
    assert any("Remove it" in each for each in comment), "when it can go stands right above"
    _, job = yaml.safe_load_all(text)
    (holder,) = job["spec"]["template"]["spec"]["containers"]
    *path, last = REMOVABLE[line]
    for name in path:
        holder = holder[name]
    del holder[last]
    kubernetes_validate.validate(job, "1.37", strict=True)
