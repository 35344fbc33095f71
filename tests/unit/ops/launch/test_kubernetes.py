"""launch/k8s: pods, each of them a node."""

import argparse
import itertools

import kubernetes_validate
import pytest
import yaml

from grpo.ops.launch import command
from grpo.ops.launch.next_attempt import DONE, FAILED, START_AGAIN
from grpo.ops.rendezvous.schedulers import read_scheduler
from tests.support.launching import ROOT
from tests.support.machine import LAUNCH


def read_manifest() -> tuple[dict, dict]:
    """(service, job)."""
    service, job = yaml.safe_load_all((LAUNCH / "k8s" / "job.yaml").read_text())
    return service, job


def environment_of(pod: int, job: dict) -> dict[str, str]:
    """What Kubernetes and the manifest set for pod `pod`, without what is looked up in the pod's own record."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    reported = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    return {**reported, "JOB_COMPLETION_INDEX": str(pod), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def test_k8s_manifest_is_valid_and_consistent() -> None:
    service, job = read_manifest()
    for manifest in (service, job):
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    spec, template = job["spec"], job["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment_of(0, job)["NNODES"])
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert job["metadata"]["name"] == service["metadata"]["name"] == pod["subdomain"], "pod k is NAME-k.NAME"
    assert pod["restartPolicy"] == "Never"
    evicted = {each["key"]: each["tolerationSeconds"] for each in pod["tolerations"] if each["effect"] == "NoExecute"}
    assert evicted == {"node.kubernetes.io/unreachable": 30, "node.kubernetes.io/not-ready": 30}
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] in (7, 8)
    assert [name for name in resources["limits"] if name.startswith("rdma/")], "NCCL goes over TCP without"
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert resources["requests"].keys() == {"cpu", "memory"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_pod_failure_policy_matches_launch_exit_codes() -> None:
    _, job = read_manifest()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {}
    for rule in rules:
        if codes := rule.get("onExitCodes"):
            assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
            by_code |= dict.fromkeys(codes["values"], rule["action"])
    unreadable = 2  # what argparse ends with
    assert by_code == {START_AGAIN: "Ignore", FAILED: "FailJob", unreadable: "FailJob"}
    assert DONE not in by_code
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]} in rules


def test_k8s_success_policy_follows_head_pod() -> None:
    """A pod that is replaced when the head has ended would wait for it, ask to be started again, and so on for ever."""
    _, job = read_manifest()
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_pod_command_parses_as_grpo_launch() -> None:
    """It is one that `grpo launch` takes, and crashes are counted under the same name in every pod that is tried."""
    _, job = read_manifest()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, name, *words = [*container["command"], *container["args"]]
    assert (program, name) == ("grpo", "launch")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(words)
    assert (args.doctor, args.resume) == (True, "auto")
    assert pod["terminationGracePeriodSeconds"] > args.stop_s
    (runs,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "runs"]
    assert f"{container['workingDir']}/{args.output_dir}".startswith(f"{runs}/"), "it is to outlive the pod"
    assert (ROOT / args.script).exists()
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"] if "valueFrom" in each
    }
    assert fields == {"GRPO_JOB": "metadata.labels['batch.kubernetes.io/controller-uid']"}


@pytest.mark.parametrize("hostname", ["grpo-1.grpo", "grpo-1.grpo.default.svc.cluster.local"])
def test_read_scheduler_in_pod_finds_nodes_and_rank(hostname: str) -> None:
    _, job = read_manifest()
    reported = read_scheduler(environment_of(1, job), hostname)
    assert reported is not None
    assert reported.nodes == ("grpo-0.grpo", "grpo-1.grpo", "grpo-2.grpo", "grpo-3.grpo")
    assert (reported.rank, reported.head_address) == (1, None), "under its name"


REMOVABLE = {
    "add: [IPC_LOCK]": ["securityContext"],
    "rdma/hca_shared_devices_a: 1": ["resources", "limits", "rdma/hca_shared_devices_a"],
    "cpu: 64": ["resources", "requests", "cpu"],
    "memory: 512Gi": ["resources", "requests", "memory"],
}


@pytest.mark.parametrize("line", REMOVABLE)
def test_k8s_manifest_requests_are_commented_and_removable(line: str) -> None:
    text = (LAUNCH / "k8s" / "job.yaml").read_text()
    lines = [each.strip() for each in text.splitlines()]
    at = lines.index(line)
    comment = list(itertools.takewhile(lambda each: each.startswith("#"), reversed(lines[:at])))
    assert any("Remove it" in each for each in comment), "when it can go stands right above"
    _, job = read_manifest()
    (holder,) = job["spec"]["template"]["spec"]["containers"]
    *path, last = REMOVABLE[line]
    for name in path:
        holder = holder[name]
    del holder[last]
    kubernetes_validate.validate(job, "1.37", strict=True)
