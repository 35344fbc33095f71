"""Addresses of this machine, and its interface towards another."""

import socket
from collections.abc import Mapping

import psutil

Interfaces = Mapping[str, tuple[str, ...]]
"""IPv4 and IPv6 addresses of each active interface, by name."""


def read_interfaces() -> Interfaces:
    up = psutil.net_if_stats()
    return {
        name: tuple(a.address.partition("%")[0] for a in found if a.family in (socket.AF_INET, socket.AF_INET6))
        for name, found in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def address_of(name: str) -> str:
    """First address `name` resolves to; '' if it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def is_local_address(name: str) -> bool:
    """True if `name` resolves to an address of this machine. All of 127/8 is local, but an interface has only one of
    them."""
    address = address_of(name)
    return address.startswith("127.") or any(address in own for own in read_interfaces().values())


def route_to(name: str, interfaces: Interfaces) -> tuple[str, str]:
    """Return the interface and the own address for packets to `name`; empty strings if unknown."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: looks up the route, sends nothing
            source = str(probe.getsockname()[0])
    except OSError:
        return "", ""
    return next((name for name, own in interfaces.items() if source.partition("%")[0] in own), ""), source
