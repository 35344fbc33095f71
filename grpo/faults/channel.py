"""JSON lines over TCP between the nodes' sentinels, after a mutual handshake with the job's secret.

Nothing is unpickled, and a line has a bounded length.
"""

import contextlib
import fcntl
import hmac
import itertools
import json
import secrets
import select
import socket
import struct
import termios
import time
from dataclasses import asdict
from typing import Any

from grpo.faults.liveness import NodePlace
from grpo.place.timeouts import USUAL, Timeouts

MAX_LINE_BYTES = 1 << 20
MAX_GREETING_BYTES = 4096  # of a line before the handshake
MAX_UNSENT_BYTES = 8 << 20  # to a peer that does not read
MAX_READ_BYTES = 1 << 16  # per turn of the loop, which reads other connections too
AGAIN_S = 0.2

Message = dict[str, Any]
_TCP_RTO_MAX_MS = 44  # of Linux 6.15
_LAST_ACK = struct.Struct("56xI")  # `tcpi_last_ack_recv` of `struct tcp_info`, in ms
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: `struct ucred`


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end of a Unix socket, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


class Channel:
    """A non-blocking connection. `is_open` turns False when the other side closes it, or it is lost."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_open = True
        self.error: OSError | None = None
        """Error that lost the connection; None if the other side closed it, as the kernel does for a dead process."""
        self.max_line_bytes = MAX_GREETING_BYTES
        self._read = b""
        self._unsent = b""

    def send(self, kind: str, **values: Any) -> None:
        """Send a message; bytes that do not fit now are sent by the next `send`."""
        self._unsent += json.dumps({"kind": kind, **values}).encode() + b"\n"
        try:
            while self._unsent and self.is_open:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            self.is_open = len(self._unsent) < MAX_UNSENT_BYTES
        except OSError as error:
            self._unsent = b""  # `receive` shows if the peer sent something before it went
            self._note(error)

    def receive(self) -> list[Message]:
        """Read once, and return the messages. An overlong line or an invalid message closes the connection."""
        try:
            chunk = self.socket.recv(MAX_READ_BYTES)
            self._read += chunk
            self.is_open = self.is_open and bool(chunk)
        except BlockingIOError:
            pass
        except OSError as error:
            self.is_open = False
            self._note(error)
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
        if len(self._read) > self.max_line_bytes:
            self.is_open = False
        return messages

    def _note(self, error: OSError) -> None:
        """Keep the first error: the kernel reports it once. A broken pipe only follows the other side's end."""
        if self.error is None and not isinstance(error, BrokenPipeError):
            self.error = error

    def unconfirmed_s(self) -> float:
        """Seconds since the other machine's last TCP ACK; its kernel sends ACKs even while the process is stopped."""
        information = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
        return _LAST_ACK.unpack(information)[0] / 1000

    def has_arrived(self) -> bool:
        """True if everything sent has reached the other machine's kernel."""
        unconfirmed = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        return not self._unsent and not any(unconfirmed)

    def close(self) -> None:
        self.is_open = False
        self.socket.close()


def tune(connection: socket.socket, timeout_s: float) -> None:
    """Set TCP options: no delay for small messages, and a kernel timeout above ours for peers without ACKs."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * timeout_s))
    with contextlib.suppress(OSError):  # optional: without it an older kernel doubles its wait with each retry
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


def new_challenge() -> str:
    return secrets.token_hex(32)


def proof(secret: str, role: str, challenge: str, own_challenge: str, node: int) -> str:
    """Return an HMAC to prove knowledge of the secret, as `role` of node `node`, for the other side's challenge."""
    text = f"{role}|{challenge}|{own_challenge}|{node}"
    return hmac.new(bytes.fromhex(secret), text.encode(), "sha256").hexdigest()


def is_proof(given: Any, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


class Introduction:
    """Handshake over `connection`: each side proves its knowledge of the secret."""

    def __init__(self, connection: socket.socket, secret: str, place: NodePlace) -> None:
        self.channel = Channel(connection)
        self._secret, self._place = secret, place
        self._ours, self._theirs = new_challenge(), ""

    def read_place(self) -> NodePlace | None:
        """Read arrived messages. Returns the other side's place once that side has proved its knowledge of the secret.
        The place comes with the proof: a peer that is stopped right after it can still be named.

        Raises:
            OSError: the port is closed, or the other side does not know the secret.
        """
        for message in self.channel.receive():
            match message:
                case {"kind": "challenge", "challenge": str(theirs)}:
                    self._theirs = theirs
                    shown = proof(self._secret, "node", theirs, self._ours, self._place.node)
                    self.channel.send("hello", proof=shown, challenge=self._ours, **asdict(self._place))
                case {"kind": "welcome", "proof": shown, "place": dict() as place} if self._is_the_hubs(shown):
                    self.channel.max_line_bytes = MAX_LINE_BYTES
                    self.channel.send("here")
                    return NodePlace(**place)
                case _:
                    raise ConnectionError("somebody else is there")
        if not self.channel.is_open:
            raise self.channel.error or ConnectionError("it ends the connection")
        return None

    def _is_the_hubs(self, shown: Any) -> bool:
        return is_proof(shown, proof(self._secret, "hub", self._ours, self._theirs, self._place.node))


def join(
    addresses: list[str], port: int, secret: str, place: NodePlace, timeout_s: float, timeouts: Timeouts = USUAL
) -> tuple[Channel, NodePlace]:
    """Connect to the first address whose other side knows the secret; returns the channel and its place.

    Tries each address for `hub_answer_s`, in rounds, until `hub_join_s` have passed or all ports are closed.

    Args:
        place: of this node; sent to the other side.

    Raises:
        OSError: no address works; has the reason for each.
    """
    deadline = time.monotonic() + timeouts.hub_join_s
    problems: dict[str, OSError] = {}
    for address in itertools.cycle(addresses):
        if len(problems) == len(addresses):
            refused = all(isinstance(error, ConnectionRefusedError) for error in problems.values())
            if refused or time.monotonic() > deadline:
                break
            time.sleep(AGAIN_S)
        try:
            return _join_at(address, port, secret, place, timeout_s, timeouts.hub_answer_s)
        except OSError as error:
            problems[address] = error
    raise ConnectionError(
        f"port {port} cannot be reached: {'; '.join(f'{address}: {error}' for address, error in problems.items())}: "
        "the nodes' processes must reach each other at any port, as gloo and NCCL need it too"
    )


def _join_at(
    address: str, port: int, secret: str, place: NodePlace, timeout_s: float, answer_s: float
) -> tuple[Channel, NodePlace]:
    deadline = time.monotonic() + answer_s
    connection = socket.create_connection((address, port), timeout=answer_s)
    try:
        introduction, poll = Introduction(connection, secret, place), select.poll()
        poll.register(connection, select.POLLIN)
        while time.monotonic() < deadline:
            if poll.poll(100) and (hub := introduction.read_place()) is not None:
                tune(connection, timeout_s)
                return introduction.channel, hub
        raise TimeoutError(f"says nothing for {answer_s:g} s")
    except BaseException:
        connection.close()
        raise
