"""Lines of JSON between the nodes' sentinels, after each side has shown the other that it knows the job's secret.

Nothing is unpickled, and a line has a bounded length.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
from dataclasses import asdict
from typing import Any

from grpo.faults.liveness import Place

MAX_LINE_BYTES = 1 << 20
MAX_GREETING_BYTES = 4096  # of a line from somebody who has shown nothing yet
MAX_UNSENT_BYTES = 8 << 20  # of a peer that does not read
CONNECT_S = 5.0

Message = dict[str, Any]
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: `struct ucred`


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Who is at the other end of a Unix socket, as the kernel knows it: pid and user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


class Channel:
    """A connection that never blocks. `is_open` turns False when the other side has ended it, or it is lost."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_open = True
        self.max_line_bytes = MAX_GREETING_BYTES
        self._read = b""
        self._unsent = b""

    def send(self, kind: str, **values: Any) -> None:
        """What does not go out now goes with the next `send` or `flush`."""
        self._unsent += json.dumps({"kind": kind, **values}).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent and self.is_open:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            self.is_open = len(self._unsent) < MAX_UNSENT_BYTES
        except OSError:
            self._unsent = b""  # whether it has said something before it went, `receive` tells

    def receive(self) -> list[Message]:
        """The messages that have come. A line that is too long or no message ends the connection."""
        try:
            while chunk := self.socket.recv(1 << 16):
                self._read += chunk
                if len(self._read) > self.max_line_bytes and b"\n" not in self._read:
                    break
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._read = self._read.split(b"\n")
        messages = []
        for line in lines:
            message = None
            with contextlib.suppress(ValueError):
                message = json.loads(line) if len(line) <= self.max_line_bytes else None
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                self.is_open = False
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        self.is_open = False
        self.socket.close()


def tune(connection: socket.socket, timeout_s: float) -> None:
    """What is small goes at once, and a peer that confirms nothing is given up by the kernel later than by us."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * timeout_s))


def new_challenge() -> str:
    return secrets.token_hex(32)


def proof(secret: str, role: str, challenge: str, own_challenge: str, node: int) -> str:
    """That one knows the secret, as `role` of node `node`, for the challenge of the other side."""
    text = f"{role}|{challenge}|{own_challenge}|{node}"
    return hmac.new(bytes.fromhex(secret), text.encode(), "sha256").hexdigest()


def is_proof(given: Any, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


def join(addresses: list[str], port: int, secret: str, place: Place, timeout_s: float) -> tuple[Channel, Place]:
    """A channel to the first address behind which somebody knows the secret, and who that is. Blocks `CONNECT_S` for
    each at most.

    Args:
        place: of this node, which the other side is told.

    Raises:
        OSError: there is none; says why, for each.
    """
    problems = []
    for address in addresses:
        connection = None
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
            hub = _introduce(connection, secret, place)
            tune(connection, timeout_s)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{address}: {error}")
            if connection is not None:
                connection.close()
            continue
        channel = Channel(connection)
        channel.max_line_bytes = MAX_LINE_BYTES
        return channel, hub
    raise ConnectionError(
        f"port {port} cannot be reached: {'; '.join(problems)}: the nodes' processes must reach each other at any "
        "port, as gloo and NCCL need it too"
    )


def _introduce(connection: socket.socket, secret: str, place: Place) -> Place:
    """Who is there is told with the proof: a peer that is held right behind it can still be named."""
    theirs, ours = str(_read_greeting(connection)["challenge"]), new_challenge()
    shown = proof(secret, "node", theirs, ours, place.node)
    greeting = {"kind": "hello", "node": place.node, "challenge": ours, "proof": shown, "place": asdict(place)}
    connection.sendall(json.dumps(greeting).encode() + b"\n")
    welcome = _read_greeting(connection)
    if not is_proof(welcome.get("proof"), proof(secret, "hub", ours, theirs, place.node)):
        raise ConnectionError("somebody else is there")
    return Place(**welcome["place"])


def _read_greeting(connection: socket.socket) -> Message:
    """Byte by byte: what follows is the channel's."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > MAX_GREETING_BYTES or not (byte := connection.recv(1)):
            raise ConnectionError("it ends the connection")
        line += byte
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ConnectionError("it speaks another language")
    return message
