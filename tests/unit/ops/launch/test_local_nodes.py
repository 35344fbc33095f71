"""launch/local_2node.sh: two nodes on one machine."""

import shlex
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.machine import DONE, FAILED, INTERRUPTED, START_AGAIN, Machine, option


def test_local_2node_splits_gpus_between_nodes(machine: Machine) -> None:
    machine.behave("finish")
    code, output = machine.run("local_2node.sh", "--run_name", "two words", CUDA_VISIBLE_DEVICES="7,6,5,4,3,2,1")
    assert code == DONE, output
    assert "training has finished" in output.splitlines()[-1]
    assert f"To follow: tail -F {shlex.quote(str(machine.output_dir))}/logs/train-node*.log" in output.splitlines()[0]
    for node, devices in enumerate(("7,6,5", "4,3,2")):
        launched = machine.launched(node)
        arguments = launched["arguments"]
        assert launched["environment"]["CUDA_VISIBLE_DEVICES"] == devices
        flags = ("nodes", "node-rank", "output-dir", "resume")
        given = ["127.0.0.1,127.0.0.2", str(node), str(machine.output_dir), "auto"]
        assert [option(arguments, f"--{flag}") for flag in flags] == given
        assert option(arguments, "--port") == option(machine.launched(0)["arguments"], "--port")
        assert not {"--ranks-per-node", "--config_file"} & set(arguments)
        assert arguments[-3:] == ["train.py", "--run_name", "two words"]
        assert (machine.output_dir / "logs" / f"train-node{node}.log").exists()


def test_local_2node_passes_settings_from_environment(machine: Machine) -> None:
    machine.behave("finish")
    settings = {"GRPO_RANKS_PER_NODE": "2", "GRPO_CONFIG_FILE": "configs/cpu.yaml"}
    code, output = machine.run("local_2node.sh", "examples/gsm8k.py", "--max_steps=2", **settings)
    assert code == DONE, output
    arguments = machine.launched(1)["arguments"]
    assert [option(arguments, "--ranks-per-node"), option(arguments, "--config_file")] == list(settings.values())
    assert arguments[-2:] == ["examples/gsm8k.py", "--max_steps=2"]
    assert machine.launched(1)["environment"]["CUDA_VISIBLE_DEVICES"] is None, "there are none to share"


def test_local_2node_after_failure_returns_its_exit_code(machine: Machine) -> None:
    machine.behave("hopeless", "heal")
    for expected, said in ((FAILED, "starting again would not help"), (START_AGAIN, "a node has lost its network")):
        code, output = machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")
        assert (code, said in output.splitlines()[-1]) == (expected, True), output


# A terminal's command begins with the first; a script's background command, and so all that `make test &` in a script
# starts, with the second.
@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["in-front", "in-the-background-of-a-script"])
def inherited_interrupt(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a process that is started now does about SIGINT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("inherited_interrupt")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_local_2node_with_one_signal_stops_to_resume_later(number: signal.Signals, machine: Machine) -> None:
    machine.behave("wait", "finish")
    job = machine.start("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    machine.wait_for("run_state.json")
    for node in (0, 1):
        machine.wait_for(f"logs/train-node{node}.log", "wait")
    job.send_signal(number)
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, "to go on later" in output) == (START_AGAIN, True), output
    assert machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")[0] == DONE, "the same command goes on"
    for node in (0, 1):
        assert option(machine.launched(node, attempt=1)["arguments"], "--resume") == "auto"
        assert machine.launched(node)["signals"]["SIGINT"] != str(signal.SIG_IGN)


@pytest.mark.usefixtures("inherited_interrupt")
def test_local_2node_with_second_interrupt_ends_at_once(machine: Machine) -> None:
    machine.behave("slow", "finish")
    job = machine.start("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    machine.wait_for("run_state.json")
    for node in (0, 1):
        machine.wait_for(f"logs/train-node{node}.log", "slow")
    job.send_signal(signal.SIGINT)
    for node in (0, 1):
        machine.wait_for(f"logs/train-node{node}.log", "asked to stop")
    assert job.poll() is None, "its step goes on"
    began = time.monotonic()
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert output.count("once more to end now") == 2, output
    for node in (0, 1):
        assert "ended by SIGINT" in (machine.output_dir / "logs" / f"train-node{node}.log").read_text()
    assert job.returncode == INTERRUPTED, output
    assert not list(machine.output_dir.glob("crashes*")), "a person's wish is no crash"
    assert time.monotonic() - began < 30, "not by the stub's own patience"
    assert machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")[0] == DONE, "the same command goes on"


@pytest.mark.usefixtures("inherited_interrupt")
def test_local_2node_with_interrupt_before_launch_starts_nothing(machine: Machine) -> None:
    job = machine.start("local_2node.sh", FAKE_SMI_WAITS="yes")
    machine.wait_for("asking_for_gpus")
    job.send_signal(signal.SIGINT)
    (machine.folder / "answer").touch()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == -signal.SIGINT, output
    assert not list(machine.output_dir.glob("launched*"))
