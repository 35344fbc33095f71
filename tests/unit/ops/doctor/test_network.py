"""What NCCL and gloo will make of a node's interfaces, and of its InfiniBand."""

from pathlib import Path

import pytest

from grpo.ops.doctor import network
from grpo.ops.doctor.records import Status

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


@pytest.mark.parametrize(
    ("value", "selected", "unknown"),
    [
        ("eth", ["eth0", "eth1"], []),
        ("=eth0", ["eth0"], []),
        ("=eth", [], ["eth"]),
        ("eth1,ib", ["eth1"], ["ib"]),
        ("^eth", ["lo"], []),
        ("^=eth0", ["lo", "eth1"], []),
        ("ib0", [], ["ib0"]),
    ],
)
def test_select_interfaces_follows_nccl_rules(value: str, selected: list[str], unknown: list[str]) -> None:
    assert network.select_interfaces(value, ["lo", "eth0", "eth1"]) == (selected, unknown)


def test_check_interface_names_with_unknown_name_fails() -> None:
    def check(**variables: str) -> list[tuple[Status, str]]:
        found = network.check_interface_names(variables, ["lo", "eth0"], "eth0")
        return [(finding.status, finding.fix) for finding in found]

    assert check() == [(PASS, "")]
    assert check(NCCL_SOCKET_IFNAME="eth", GLOO_SOCKET_IFNAME="eth0") == [(PASS, "")]
    assert check(NCCL_SOCKET_IFNAME="ib0") == [(FAIL, "set NCCL_SOCKET_IFNAME=eth0, or unset it")]
    assert check(NCCL_SOCKET_IFNAME="eth0,ib0")[0][0] is WARN
    assert check(GLOO_SOCKET_IFNAME="eth") == [(FAIL, "set GLOO_SOCKET_IFNAME=eth0, or unset it")]  # no prefixes


def test_check_fabric_reports_infiniband_port_states(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, value in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            (port / name).write_text(f"{value}\n")
    ports = network.read_fabric(tmp_path)
    assert {name: state for name, (state, _) in ports.items()} == {"mlx5_0:1": "ACTIVE", "mlx5_1:1": "DOWN"}
    active = {name: ports[name] for name in network.active_ports(ports)}
    assert network.check_fabric(active, {}).message == "mlx5_0:1 400 Gb/sec (4X NDR) InfiniBand"
    assert "mlx5_1:1 is DOWN" in network.check_fabric(ports, {}).message
    assert network.check_fabric(active, {"NCCL_IB_DISABLE": "1"}).status is WARN
    assert network.check_fabric({}, {"NCCL_IB_DISABLE": "1"}).status is PASS
