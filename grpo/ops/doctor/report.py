"""Examination of one node. Every check has a deadline: a hanging file system or driver becomes a finding."""

import argparse
import platform
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo.faults.deadlines import within
from grpo.ops.doctor import gpus, installation, leftovers, network, storage
from grpo.ops.doctor.records import Examination, Finding
from grpo.ops.rendezvous.addresses import address_of, read_interfaces, route_to
from grpo.ops.rendezvous.agreement import read_software
from grpo.place import devices
from grpo.place.files import Wishes
from grpo.place.gpu_needs import unmet_cpu_need
from grpo.place.same_everywhere import DISTRIBUTION, installed_version, read_variables
from grpo.preflight.versions import tested_requirements

CHECK_S = 20.0  # for one check
GPUS_S = 2 * gpus.QUERY_S + 10.0  # two queries, and torch's count

Fields = dict[str, Any]
"""Fields of the report."""
Found = Finding | list[Finding] | tuple[list[Finding], Fields]


def examine(
    node: str, asked: argparse.Namespace, job: Wishes | None, env: Mapping[str, str], *, peers: Sequence[str]
) -> Examination:
    """Make this node's report, without checks over the store. Takes seconds, at most the sum of its checks' deadlines.

    Args:
        asked: the command's options; `job`: settings from the job's files and flags.
        peers: addresses of the head, or on the head of the other nodes; the first resolvable one determines the route.
    """
    fields: Fields = {"variables": read_variables(env)}
    checks: dict[str, Callable[[], Found]] = {
        "versions": lambda: _installation(env),
        "gpus": lambda: _gpus(asked.gpus_per_node, job, env),
        "network": lambda: _network(fields["variables"], peers),
        "/dev/shm": lambda: leftovers.check_shared_memory(has_gpus=bool(fields.get("gpus"))),
        "engine folders": lambda: leftovers.check_engine_folders(Path(tempfile.gettempdir())),
        "build locks": lambda: leftovers.check_extension_locks(env, Path.home()),
        "open files": storage.check_open_files,
    }
    if asked.output_dir is not None:
        checks["output path"] = lambda: storage.check_space(asked.output_dir)
    if asked.model is not None:
        checks["model"] = lambda: storage.check_model(asked.model, has_gpus=bool(fields.get("gpus")))
    if asked.dataset is not None:
        config = None if job is None else job.dataset_config
        checks["dataset"] = lambda: storage.check_dataset(asked.dataset, config)
    findings: list[Finding] = []
    for name, check in checks.items():
        found = _with_deadline(name, check)
        if isinstance(found, tuple):
            found, filled = found
            fields |= filled
        findings += found if isinstance(found, list) else [found]
    return Examination(node=node, host=socket.gethostname(), findings=tuple(findings), **fields)


def _with_deadline(name: str, check: Callable[[], Found]) -> Found:
    try:
        return within(GPUS_S if name == "gpus" else CHECK_S, check)
    except TimeoutError as error:
        fix = "look for a mount or a driver that hangs: df, nvidia-smi, dmesg"
        return Finding.fail(name, str(error), fix)
    except (OSError, ValueError, subprocess.SubprocessError, metadata.PackageNotFoundError) as error:
        message = f"could not be checked: {type(error).__name__}: {error}"
        return Finding.warn(name, message, "mend that, and run again")


def _installation(env: Mapping[str, str]) -> tuple[list[Finding], Fields]:
    always, engines = tested_requirements()
    findings = installation.check_versions(
        always,
        engines,
        python=platform.python_version(),
        requires_python=metadata.metadata(DISTRIBUTION)["Requires-Python"] or "",
        installed=installed_version,
    )
    return findings, asdict(read_software(env))


def _gpus(asked: int | None, job: Wishes | None, env: Mapping[str, str]) -> tuple[list[Finding], Fields]:
    if job is not None and job.use_cpu:
        need = unmet_cpu_need()
        engines = Finding.fail("cpu engines", *need) if need else Finding.passed("cpu engines", "libnuma is there")
        return [Finding.passed("gpus", "none: the job asks for CPUs (use_cpu)"), engines], {"gpus": 0}
    seen, mistake = 0, None
    try:
        seen = devices.seen_gpus(env, use_cpu=False)
    except devices.DeviceMistake as error:
        mistake = error
    found, processes = gpus.query_gpus()
    visible = gpus.visible_gpus(found, env.get("CUDA_VISIBLE_DEVICES"))
    count = gpus.check_gpu_count(seen=seen, asked=asked, gpus=visible, mistake=mistake)
    fields: Fields = {"gpus": seen, "driver": found[0].driver if found else ""}
    build = devices.torch_build()
    needs = gpus.check_needs(build, env, driver=fields["driver"]) if build and (seen or found) else []
    return [count, *needs, *gpus.check_gpu_memory(visible, processes)], fields


def _network(variables: Mapping[str, str], peers: Sequence[str]) -> tuple[list[Finding], Fields]:
    up = read_interfaces()
    routes = (route_to(peer, up) for peer in peers)
    interface, source = next((route for route in routes if any(route)), ("", ""))
    ports = network.read_fabric()
    fields = {
        "network": network.network_identity(),
        "own_address": address_of(socket.gethostname()),
        "route_interface": interface,
        "route_source": source,
        "infiniband": tuple(sorted({name.partition(":")[0] for name in network.active_ports(ports)})),
    }
    names = network.check_interface_names(variables, list(up), interface)
    return [*names, network.check_fabric(ports, variables)], fields
