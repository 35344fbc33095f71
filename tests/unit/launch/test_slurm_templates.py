"""The Slurm templates, and what follows an attempt, which all scripts leave to next_attempt.py."""

import re
import signal

import pytest

from tests.launching import ROOT
from tests.unit.launch.machine import DONE, FAILED, LAUNCH, START_AGAIN, Machine, option

TEMPLATES = ("train.sbatch", "train_torchrun.sbatch")
LAUNCHER = {"train.sbatch": "accelerate", "train_torchrun.sbatch": "torchrun"}


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
