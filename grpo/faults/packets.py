"""Packets between a rank and its node's sentinel: JSON, and descriptors beside it."""

import array
import contextlib
import json
import socket
from typing import Any

MAX_PACKET_BYTES = 1 << 17
MAX_DESCRIPTORS = 2


def receive(connection: socket.socket) -> tuple[bytes | None, list[int]]:
    """A packet and the descriptors with it; None: nothing has come; b"": it has ended."""
    descriptors = array.array("i")
    try:
        packet, ancillary, _, _ = connection.recvmsg(
            MAX_PACKET_BYTES, socket.CMSG_LEN(MAX_DESCRIPTORS * descriptors.itemsize)
        )
    except BlockingIOError:
        return None, []
    except OSError:
        return b"", []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content)
    return packet, list(descriptors)


def message_in(packet: bytes) -> dict[str, Any]:
    """{} where there is none: one packet is not worth the sentinel."""
    with contextlib.suppress(ValueError):
        if isinstance(message := json.loads(packet), dict):
            return message
    return {}
