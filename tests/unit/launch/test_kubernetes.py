"""launch/k8s: pods, each of them a node."""

import itertools
import json
import signal
import subprocess
import sys
import time

import kubernetes_validate
import pytest
import yaml

from tests.launching import ROOT
from tests.unit.launch.machine import DONE, FAILED, LAUNCH, START_AGAIN, Machine, option


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


def test_a_pod_whose_gpus_are_missing(built_for_gpus: Machine, pod: Machine) -> None:
    code, output = pod.run("k8s/node.sh", JOB_COMPLETION_INDEX="0")
    assert (code, "sees no GPU" in output, "nvidia.com/gpu: 8" in output) == (FAILED, True, True), output
    assert not pod.lines("doctor")


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
