"""Packets between a rank and its node's sentinel: JSON over a SOCK_SEQPACKET Unix socket, with file descriptors.

Needs no other framing: a packet is sent whole or not at all, so a blocked receiver blocks no sender. The kernel
identifies the connecting process.
"""

import array
import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Any

MAX_PACKET_BYTES = 1 << 17
MAX_DESCRIPTORS = 2


class PacketSocket:
    """One end of the socket. Nothing blocks, and `send` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.descriptors: list[int] = []
        """File descriptors from the last packet."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: str, *, descriptors: Sequence[int] = (), **values: Any) -> bool:
        """Send a packet; return False if it was not sent: the other side is gone, or is stopped and its buffer is
        full."""
        packet = json.dumps({"kind": kind, **values}).encode()
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([packet], beside)
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if there is none; {} for an invalid packet, which is ignored.

        Raises:
            EOFError: the other side has closed the socket.
        """
        descriptors = array.array("i")
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(
                MAX_PACKET_BYTES, socket.CMSG_LEN(MAX_DESCRIPTORS * descriptors.itemsize)
            )
        except BlockingIOError:
            return None
        except OSError:
            packet, ancillary = b"", []
        if not packet:
            raise EOFError
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content)
        self.descriptors = list(descriptors)
        with contextlib.suppress(ValueError):
            if isinstance(message := json.loads(packet), dict):
                return message
        return {}
