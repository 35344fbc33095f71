"""Under which addresses this machine is reached, and by which interface it reaches another."""

import socket
from collections.abc import Mapping

import psutil

Interfaces = Mapping[str, tuple[str, ...]]
"""IPv4 and IPv6 addresses of each interface that is up, by its name."""


def read_interfaces() -> Interfaces:
    up = psutil.net_if_stats()
    return {
        name: tuple(a.address.partition("%")[0] for a in found if a.family in (socket.AF_INET, socket.AF_INET6))
        for name, found in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def address_of(name: str) -> str:
    """The first address that `name` resolves to; empty when it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def is_local_address(name: str) -> bool:
    """Whether `name` resolves to an address of this machine. All of 127/8 is, and an interface has one of them."""
    address = address_of(name)
    return address.startswith("127.") or any(address in own for own in read_interfaces().values())


def route_to(name: str, interfaces: Interfaces) -> tuple[str, str]:
    """The interface and the own address from which packets to `name` leave; empty strings where that is unknown."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: looks the route up, sends nothing
            source = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    return next((name for name, own in interfaces.items() if source.partition("%")[0] in own), ""), source
