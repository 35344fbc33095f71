"""launch/local_2node.sh: two nodes on one machine."""

import signal
from collections.abc import Iterator

import pytest

from tests.unit.launch.machine import DONE, FAILED, START_AGAIN, Machine, option


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


def test_two_local_nodes_whose_gpus_are_hidden(built_for_gpus: Machine) -> None:
    machine = built_for_gpus
    machine.behave("finish")
    code, output = machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    assert (code, "sees no GPU (CUDA_VISIBLE_DEVICES='')" in output) == (FAILED, True), output
    code, output = machine.run("local_2node.sh", "--use_cpu", CUDA_VISIBLE_DEVICES="")
    assert code == DONE, output


# A terminal's command begins with the first; a script's background command, and so all that `make test &` in a script
# starts, with the second.
@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["in-front", "in-the-background-of-a-script"])
def inherited_interrupt(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a process that is started now does about SIGINT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("inherited_interrupt")
def test_interrupting_local_nodes_asks_for_a_checkpoint(machine: Machine) -> None:
    machine.behave("wait", "finish")
    job = machine.start("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    machine.wait_for("launched.0.0.json")
    machine.wait_for("launched.0.1.json")
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=30)
    assert (job.returncode, "to go on later" in output) == (START_AGAIN, True), output
    assert machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")[0] == DONE, "the same command goes on"


@pytest.mark.usefixtures("inherited_interrupt")
def test_interrupting_before_a_local_node_has_begun(machine: Machine) -> None:
    job = machine.start("local_2node.sh", CUDA_VISIBLE_DEVICES="", FAKE_TORCH="waits")
    machine.wait_for("asking_torch")
    job.send_signal(signal.SIGINT)
    (machine.folder / "torch_answers").touch()
    output, _ = job.communicate(timeout=30)
    assert job.returncode == -signal.SIGINT, output
    assert not list(machine.output_dir.glob("launched*"))


def test_a_local_node_that_fails_ends_the_other(machine: Machine) -> None:
    machine.behave("lopsided")
    code, output = machine.run("local_2node.sh", CUDA_VISIBLE_DEVICES="")
    assert code == START_AGAIN, output
    assert "stopped after step 3" in output or "died without a word" in output
