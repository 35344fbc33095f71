"""The Slurm templates: what `grpo launch` is given on each node, and what follows its end."""

import re
import signal

import pytest

from tests.support.launching import ROOT
from tests.support.machine import DONE, FAILED, LAUNCH, START_AGAIN, Machine, option

TEMPLATES = ("train.sbatch", "train_torchrun.sbatch")
LAUNCHER = {"train.sbatch": "accelerate", "train_torchrun.sbatch": "torchrun"}


@pytest.mark.parametrize("template", TEMPLATES)
def test_slurm_header_holds_required_options(template: str) -> None:
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


def test_slurm_templates_differ_only_in_launcher() -> None:
    def rest(template: str) -> str:
        text = (LAUNCH / template).read_text()
        text = text.replace(template, "TEMPLATE").replace("`accelerate launch`", "`torchrun`")
        return re.sub(r" +", " ", re.sub(r"^(config_file|launcher)=.*\n", "", text, flags=re.MULTILINE))

    assert rest("train.sbatch") == rest("train_torchrun.sbatch")


@pytest.mark.parametrize("template", TEMPLATES)
def test_slurm_template_starts_grpo_launch_on_each_node(template: str, machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run(template, "--run_name", "two words", "--max_steps=5", FAKE_GPUS="8 7")
    assert code == DONE, output
    for node in (0, 1):
        launched = machine.launched(node)
        arguments = launched["arguments"]
        script = arguments.index("train.py")
        assert arguments[script:] == ["train.py", "--run_name", "two words", "--max_steps=5"]
        own = arguments[:script]
        assert "--doctor" in own
        flags = ("launcher", "output-dir", "resume", "max-crashes", "stop-s")
        given = [LAUNCHER[template], str(machine.output_dir), "auto", "3", "600"]
        assert [option(own, f"--{flag}") for flag in flags] == given
        assert "--ranks-per-node" not in own, "grpo launch counts the GPUs"
        if template == "train.sbatch":
            assert "--config_file" not in own, "without one grpo launch takes ZeRO-3"
        else:
            assert (ROOT / option(own, "--config_file")).exists()
        environment = launched["environment"]
        assert (environment["GRPO_JOB"], environment["GRPO_ATTEMPT"]) == ("123456", "0")
        assert environment["GRPO_STOP_LEAD_S"] == "600"
        assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(8 - node))), "all of the node's"
        log = machine.output_dir / "logs" / f"train-node{node}.job-123456.attempt-0.log"
        assert log.read_text().startswith(f"stub on node {node}, attempt 0: finish\n[grpo] ")
    options = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=96", "--mem=0", "--gpus=15"}
    assert options <= set(machine.lines("srun_options"))
    assert "--kill-on-bad-exit=0" in machine.lines("srun_options"), "rank 0 may still be writing"


@pytest.mark.parametrize("script", ["train.sbatch", "local_2node.sh"])
def test_launch_script_makes_output_folder_private(script: str, machine: Machine) -> None:
    new = machine.folder / "runs" / "new"
    _, output = machine.run(script, GRPO_OUTPUT_DIR=str(new), FAKE_GPUS="1 1", CUDA_VISIBLE_DEVICES="")
    assert new.stat().st_mode & 0o777 == 0o700, output
    assert (new / "logs").is_dir()
    new.chmod(0o750)
    machine.run(script, GRPO_OUTPUT_DIR=str(new), FAKE_GPUS="1 1", CUDA_VISIBLE_DEVICES="")
    assert new.stat().st_mode & 0o777 == 0o750, "one that is there stays as it is"


def test_slurm_template_in_array_requeues_only_its_task(machine: Machine) -> None:
    """The array's number is that of one of its jobs, and stands for all."""
    machine.behave("heal")
    array = {"SLURM_ARRAY_JOB_ID": machine.env["SLURM_JOB_ID"], "SLURM_ARRAY_TASK_ID": "2"}
    code, output = machine.run("train.sbatch", FAKE_GPUS="8 8", **array)
    assert (code, machine.lines("requeued")) == (DONE, ["requeue"]), output
    assert "not expected" not in output


def test_slurm_template_passes_custom_script_and_arguments(machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run("train.sbatch", "examples/gsm8k.py", "--config", "x.yaml")
    assert code == DONE, output
    assert machine.launched(1)["arguments"][-3:] == ["examples/gsm8k.py", "--config", "x.yaml"]


def test_slurm_template_passes_settings_from_environment(machine: Machine) -> None:
    machine.behave("finish")
    settings = {
        "GRPO_CONFIG_FILE": "configs/1node.yaml",
        "GRPO_RANKS_PER_NODE": "3",
        "GRPO_STOP_S": "90",
        "GRPO_MAX_CRASHES": "5",
    }
    code, output = machine.run("train.sbatch", FAKE_GPUS="", **settings)
    assert code == DONE, output
    flags = ("config_file", "ranks-per-node", "stop-s", "max-crashes")
    arguments = machine.launched(1)["arguments"]
    assert [option(arguments, f"--{flag}") for flag in flags] == list(settings.values())
    assert machine.launched(0)["environment"]["GRPO_STOP_LEAD_S"] == "90"
    assert not [line for line in machine.lines("srun_options") if line.startswith("--gpus")], "there are none"


def test_slurm_template_with_invalid_command_line_does_not_requeue(machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run("train.sbatch", "no_such_script.py")
    log = machine.output_dir / "logs" / "train-node0.job-123456.attempt-0.log"
    assert "no_such_script.py" in log.read_text()
    assert (code, str(log.parent) in output) == (2, True), output
    assert not machine.lines("requeued")


# behaviour of each attempt -> exit code of the last one, how often the job was requeued, what it says
ENDS = {
    "finished": (["finish"], DONE, 0, "every node has ended well"),
    "cannot-heal": (["hopeless"], FAILED, 0, "starting again would not help: 28 training processes were asked for"),
    "three-crashes": (["heal", "vanish", "lopsided"], FAILED, 2, "crash 3 of 3 in a row"),
    "crashes-with-progress": (
        ["progress", "progress", "progress", "vanish", "finish"],
        DONE,
        4,
        "every node has ended well",
    ),
    "progress-starts-the-count-again": (
        ["vanish", "vanish", "progress", "vanish", "vanish", "vanish"],
        FAILED,
        5,
        "crash 3 of 3",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_slurm_template_requeues_until_done_or_crash_limit(case: str, machine: Machine) -> None:
    behaviours, expected_code, requeues, said = ENDS[case]
    machine.behave(*behaviours)
    for attempt in range(len(behaviours)):
        assert len(machine.lines("requeued")) == attempt
        restarts = {"SLURM_RESTART_COUNT": str(attempt)} if attempt else {}
        code, output = machine.run("train.sbatch", **restarts)
    assert (code, said in output) == (expected_code, True), output
    assert len(machine.lines("requeued")) == requeues
    assert all((machine.output_dir / f"launched.{attempt}.1.json").exists() for attempt in range(len(behaviours)))


def test_slurm_template_with_time_limit_signal_stops_and_requeues(machine: Machine) -> None:
    machine.behave("wait")
    job = machine.start("train.sbatch")
    machine.wait_for("launched.0.1.json")
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == DONE, output
    assert "stopped after step 3 to go on later" in output
    assert machine.lines("requeued") == ["requeue"]
    assert not list(machine.output_dir.glob("stop*")), "answered"


def test_slurm_template_with_signal_in_reused_folder_stops(machine: Machine) -> None:
    machine.behave("finish", "wait")
    assert machine.run("train.sbatch", SLURM_JOB_ID="123455")[0] == DONE
    job = machine.start("train.sbatch")
    machine.wait_for("launched.1.1.json")
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, "stopped after step 3 to go on later" in output) == (DONE, True), output


def test_slurm_template_with_stop_file_ends_without_requeue(machine: Machine) -> None:
    machine.behave("wait", "finish")
    job = machine.start("train.sbatch")
    machine.wait_for("launched.0.1.json")
    (machine.output_dir / "stop").touch()
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, machine.lines("requeued")) == (DONE, []), output
    # ... or while it waits in the queue.
    (machine.output_dir / "stop").touch()
    code, output = machine.run("train.sbatch", SLURM_RESTART_COUNT="1")
    assert (code, "not training" in output) == (DONE, True), output
    assert not (machine.output_dir / "launched.1.0.json").exists()
    assert not (machine.output_dir / "stop").exists()


def test_slurm_template_with_refused_requeue_prints_sbatch_command(machine: Machine) -> None:
    machine.behave("vanish")
    code, output = machine.run("train.sbatch", FAKE_REFUSES="1")
    assert code == START_AGAIN
    command = f"GRPO_OUTPUT_DIR={machine.output_dir} sbatch /home/me/grpo/launch/train.sbatch --max_steps 5"
    assert output.rstrip().endswith(command), output
