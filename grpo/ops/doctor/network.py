"""Interfaces and fabric of one node, and their use by NCCL and gloo."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.ops.doctor.records import Finding


def network_identity() -> str:
    """Identity of a network: equal on two nodes only if they share one kernel and one network namespace, so that a
    loopback address of one is also the other's."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/net')}"


def select_interfaces(value: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the interfaces in `names` selected by NCCL_SOCKET_IFNAME=value, and entries of the value that select none.

    `eth,ib` are prefixes, `=eth0` is exact, `^docker` excludes, `^=docker0` excludes exactly; a leading sign applies to
    the whole list. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    bare = value.lstrip("^=")
    sign = value.removesuffix(bare)
    hits: dict[str, list[str]] = {}
    for entry in filter(None, bare.split(",")):
        hits[entry] = [name for name in names if (name == entry if "=" in sign else name.startswith(entry))]
    named = {name for found in hits.values() for name in found}
    if "^" in sign:
        return [name for name in names if name not in named], []
    return [name for name in names if name in named], [entry for entry, found in hits.items() if not found]


def check_interface_names(variables: Mapping[str, str], names: Sequence[str], route_interface: str) -> list[Finding]:
    """Check that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name interfaces that are up on this node."""
    present = f"up on this node: {', '.join(names) or 'none'}"
    good = route_interface or "the interface that the nodes share"
    findings = []
    if value := variables.get("NCCL_SOCKET_IFNAME"):
        selected, unknown = select_interfaces(value, names)
        if not selected:
            fix = f"set NCCL_SOCKET_IFNAME={good}, or unset it"
            message = f"NCCL_SOCKET_IFNAME={value} selects no interface; {present}"
            findings.append(Finding.fail("interfaces", message, fix))
        elif unknown:
            fix = "NCCL takes the others; take the wrong name out"
            message = f"NCCL_SOCKET_IFNAME={value}: no interface {', '.join(unknown)}; {present}"
            findings.append(Finding.warn("interfaces", message, fix))
    if value := variables.get("GLOO_SOCKET_IFNAME"):
        unknown = [name for name in value.split(",") if name not in names]  # full names; gloo needs all of them
        if unknown:
            fix = f"set GLOO_SOCKET_IFNAME={good}, or unset it"
            message = f"GLOO_SOCKET_IFNAME={value}: no interface {', '.join(unknown)}; {present}"
            findings.append(Finding.fail("interfaces", message, fix))
    names_set = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    shown = " ".join(f"{name}={variables[name]}" for name in names_set if variables.get(name))
    return findings or [Finding.passed("interfaces", shown or f"{' and '.join(names_set)} are not set")]


# -- InfiniBand ---------------------------------------------------------------------------------------------------


Ports = Mapping[str, tuple[str, str]]
"""InfiniBand or RoCE ports by name, `mlx5_0:1`: the state (`ACTIVE`, `DOWN`, `INIT` …), and rate and link layer
(`400 Gb/sec (4X NDR) InfiniBand`) from the driver."""


def read_fabric(root: Path = Path("/sys/class/infiniband")) -> Ports:
    ports = {}
    for port in sorted(root.glob("*/ports/*")):
        state, rate, layer = ((port / what).read_text().strip() for what in ("state", "rate", "link_layer"))
        ports[f"{port.parent.parent.name}:{port.name}"] = (state.rpartition(": ")[2], f"{rate} {layer}")
    return ports


def active_ports(ports: Ports) -> list[str]:
    return [name for name, (state, _) in ports.items() if state == "ACTIVE"]


def check_fabric(ports: Ports, variables: Mapping[str, str]) -> Finding:
    """Report the InfiniBand devices NCCL will find on this node."""
    if not ports:
        return Finding.passed("infiniband", "no device: NCCL goes over TCP")
    active = active_ports(ports)
    shown = ", ".join(f"{name} {ports[name][1]}" for name in active)
    if variables.get("NCCL_IB_DISABLE", "0") != "0":
        fix = "unset NCCL_IB_DISABLE, unless the fabric is known to be broken"
        return Finding.warn("infiniband", f"NCCL_IB_DISABLE is set: NCCL goes over TCP, beside {shown or 'ports'}", fix)
    if len(active) < len(ports):
        states = ", ".join(f"{name} is {ports[name][0]}" for name in ports if name not in active)
        fix = "expected for ports without a cable; else look at the cable and the subnet manager (ibstat)"
        return Finding.warn("infiniband", f"{states}; active: {shown or 'none'}", fix)
    return Finding.passed("infiniband", shown)
