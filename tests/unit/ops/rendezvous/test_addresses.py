"""Addresses and routes of this machine, and the deadline of what has none."""

import time

import pytest

from grpo.faults.deadlines import within
from grpo.ops.rendezvous.addresses import address_of, is_local_address, read_interfaces, route_to


def test_read_interfaces_and_route_to_find_loopback() -> None:
    interfaces = read_interfaces()
    assert "127.0.0.1" in interfaces["lo"]
    assert route_to("127.0.0.1", interfaces) == ("lo", "127.0.0.1")
    assert route_to("no-such-host.invalid", interfaces) == ("", "")


def test_is_local_address_is_true_only_for_this_machine() -> None:
    assert is_local_address("127.0.0.1")
    assert not is_local_address("192.0.2.1")  # of a block that nobody has, RFC 5737
    assert not is_local_address("no such name")
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("no such name") == ""


def test_within_deadline_returns_or_raises_timeout() -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(TimeoutError, match=r"within 0 s"):
        within(0.05, lambda: time.sleep(2))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
