"""Interfaces, routes and fabric of one node, and what NCCL and gloo will make of them."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.doctor.records import Finding, Status

_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 0x1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    """Its first IPv4 address and its IPv6 addresses."""


def read_interfaces() -> list[Interface]:
    """The interfaces that are up. By the kernel's own calls: slim containers have no `ip` command."""
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            flags = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
            if not flags & _IFF_UP:
                continue
            addresses = []
            with contextlib.suppress(OSError):  # it has no IPv4 address
                addresses.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
            interfaces.append(Interface(name=name, addresses=(*addresses, *_ipv6_addresses(name))))
    return interfaces


def _ipv6_addresses(interface: str) -> list[str]:
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return [str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == interface]


def address_of(name: str) -> str:
    """The first address that `name` resolves to; empty when it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def route_to(name: str, interfaces: Sequence[Interface]) -> tuple[str, str]:
    """The interface and the own address from which packets to `name` leave; empty strings where that is unknown."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: looks the route up, sends nothing
            source = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    return next((i.name for i in interfaces if source.partition("%")[0] in i.addresses), ""), source


def network_identity() -> str:
    """Equal on two nodes exactly when they share one kernel and one network namespace: a loopback address of one is
    then the other's too."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.readlink('/proc/self/ns/net')}"


def select_interfaces(value: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which of `names` NCCL_SOCKET_IFNAME=value selects, and which entries of the value select none.

    `eth,ib` are prefixes, `=eth0` is exact, `^docker` excludes, `^=docker0` excludes exactly; a leading sign holds for
    the whole list. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    excludes = value.startswith("^")
    exact = value.removeprefix("^").startswith("=")
    entries = [entry for entry in value.removeprefix("^").removeprefix("=").split(",") if entry]

    def named(entry: str) -> list[str]:
        return [name for name in names if (name == entry if exact else name.startswith(entry))]

    hit = {name for entry in entries for name in named(entry)}
    selected = [name for name in names if (name in hit) is not excludes]
    return selected, [] if excludes else [entry for entry in entries if not named(entry)]


def check_interface_names(variables: Mapping[str, str], names: Sequence[str], route_interface: str) -> list[Finding]:
    """Whether NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name interfaces that are up on this node."""
    present = f"up on this node: {', '.join(names) or 'none'}"
    good = route_interface or "the interface that the nodes share"
    findings = []

    def add(status: Status, message: str, fix: str) -> None:
        findings.append(Finding(check="interfaces", status=status, message=message, fix=fix))

    if value := variables.get("NCCL_SOCKET_IFNAME"):
        selected, unknown = select_interfaces(value, names)
        if not selected:
            fix = f"set NCCL_SOCKET_IFNAME={good}, or unset it"
            add(Status.FAIL, f"NCCL_SOCKET_IFNAME={value} selects no interface; {present}", fix)
        elif unknown:
            fix = "NCCL takes the others; take the wrong name out"
            add(Status.WARN, f"NCCL_SOCKET_IFNAME={value}: no interface {', '.join(unknown)}; {present}", fix)
    if value := variables.get("GLOO_SOCKET_IFNAME"):
        unknown = [name for name in value.split(",") if name not in names]  # whole names; gloo wants all of them
        if unknown:
            fix = f"set GLOO_SOCKET_IFNAME={good}, or unset it"
            add(Status.FAIL, f"GLOO_SOCKET_IFNAME={value}: no interface {', '.join(unknown)}; {present}", fix)
    if not findings:
        shown = [f"{name}={variables[name]}" for name in _NAMING if variables.get(name)]
        message = " ".join(shown) or f"{' and '.join(_NAMING)} are not set"
        findings.append(Finding(check="interfaces", status=Status.PASS, message=message))
    return findings


_NAMING = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


# -- InfiniBand ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPort:
    """One port of an InfiniBand or RoCE device."""

    device: str
    port: str
    state: str
    """`ACTIVE`, `DOWN`, `INIT` …"""
    rate: str
    """As the driver tells it: `400 Gb/sec (4X NDR)`."""
    link_layer: str
    """`InfiniBand`, or `Ethernet` for RoCE."""


def read_fabric(root: Path = Path("/sys/class/infiniband")) -> list[FabricPort]:
    return [
        FabricPort(
            device=port.parent.parent.name,
            port=port.name,
            state=(port / "state").read_text().strip().rpartition(": ")[2],
            rate=(port / "rate").read_text().strip(),
            link_layer=(port / "link_layer").read_text().strip(),
        )
        for port in sorted(root.glob("*/ports/*"))
    ]


def check_fabric(ports: Sequence[FabricPort], variables: Mapping[str, str]) -> Finding:
    """What NCCL finds of InfiniBand on this node."""

    def finding(status: Status, message: str, fix: str = "") -> Finding:
        return Finding(check="infiniband", status=status, message=message, fix=fix)

    if not ports:
        return finding(Status.PASS, "no device: NCCL goes over TCP")
    active = [port for port in ports if port.state == "ACTIVE"]
    shown = ", ".join(f"{port.device}:{port.port} {port.rate} {port.link_layer}" for port in active)
    if variables.get("NCCL_IB_DISABLE", "0") != "0":
        fix = "unset NCCL_IB_DISABLE, unless the fabric is known to be broken"
        return finding(Status.WARN, f"NCCL_IB_DISABLE is set: NCCL goes over TCP, beside {shown or 'ports'}", fix)
    if inactive := [port for port in ports if port.state != "ACTIVE"]:
        states = ", ".join(f"{port.device}:{port.port} is {port.state}" for port in inactive)
        fix = "expected for ports without a cable; else look at the cable and the subnet manager (ibstat)"
        return finding(Status.WARN, f"{states}; active: {shown or 'none'}", fix)
    return finding(Status.PASS, shown)
