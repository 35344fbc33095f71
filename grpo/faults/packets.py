"""Packets between a rank and its node's sentinel: JSON in a Unix socket that keeps their bounds, descriptors beside.

No other framing fits: a packet is sent whole or not at all, so that who cannot be told waits for nobody, and whoever
connects is known by the kernel's word.
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
    """One end. Nothing blocks, and `send` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.descriptors: list[int] = []
        """Those that came with the last packet."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: str, *, descriptors: Sequence[int] = (), **values: Any) -> bool:
        """Whether it went out: the other side may be held, and read nothing, or be gone."""
        packet = json.dumps({"kind": kind, **values}).encode()
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._socket.sendmsg([packet], beside)
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """The next message; {} for a packet that is none, which is not worth a process. None: nothing has come.

        Raises:
            EOFError: the other side has ended it.
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
