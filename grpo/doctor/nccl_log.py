"""Which network NCCL took, from its own log."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.doctor.records import Finding, Status

_BOOTSTRAP = re.compile(r"NCCL INFO Bootstrap ?: Using (?:\[0\])?([^\s:]+):(\S+?)<\d+>")
_NETWORK = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (\S+)")
_TRANSPORT = re.compile(r"NCCL INFO NET/(\w+) ?: Using (.*)")
_WARNING = re.compile(r"NCCL WARN (.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclNetwork:
    """What one process's NCCL chose; empty strings for what its log does not say."""

    interface: str
    """Of the bootstrap, and of the data where there is no InfiniBand."""
    address: str
    transport: str
    """`IB`, `Socket`, or a plugin's name."""
    devices: str
    """As NCCL lists them: `[0]mlx5_0:1/IB [1]mlx5_1:1/IB`."""


def read_nccl_log(text: str) -> NcclNetwork:
    bootstrap, network, transport = _BOOTSTRAP.search(text), _NETWORK.search(text), _TRANSPORT.search(text)
    name = network[1] if network else transport[1] if transport else ""
    devices = next((found[2] for found in _TRANSPORT.finditer(text) if found[1] == name), "")
    return NcclNetwork(
        interface=bootstrap[1] if bootstrap else "",
        address=bootstrap[2] if bootstrap else "",
        transport=name,
        devices=devices.partition(";")[0].replace("[RO]", "").strip(),
    )


def warnings_of(text: str, last: int = 3) -> list[str]:
    """The last different warnings that NCCL wrote."""
    return list(dict.fromkeys(found[1].strip() for found in _WARNING.finditer(text)))[-last:]


def check_nccl_network(
    chosen: NcclNetwork, *, node: str, route_interface: str, infiniband: Sequence[str], num_nodes: int
) -> Finding:
    """Whether NCCL took the interface that joins the nodes, and InfiniBand where there is some.

    Args:
        route_interface: of this node, towards the head; empty when unknown.
        infiniband: devices of this node with an active port.
    """
    shown = f"NCCL: bootstrap by {chosen.interface or '?'} ({chosen.address}), data by {chosen.transport or '?'}"
    shown += f" {chosen.devices}" if chosen.devices else ""
    status, fix = Status.PASS, ""
    if num_nodes > 1 and route_interface and chosen.interface and chosen.interface != route_interface:
        status = Status.WARN
        fix = (
            f"{route_interface} routes to the head: if NCCL hangs or is slow, set NCCL_SOCKET_IFNAME={route_interface}"
        )
    if num_nodes > 1 and infiniband and chosen.transport == "Socket":
        status = Status.WARN
        fix = f"unset NCCL_IB_DISABLE, or set NCCL_IB_HCA={','.join(infiniband)}; is libibverbs in the container?"
    return Finding(check="nccl network", status=status, message=shown, fix=fix, nodes=(node,))
