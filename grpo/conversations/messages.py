"""What a rank and its node's broker say to each other: JSON and arrays in one message, nothing is unpickled."""

import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo.job.wire import Wire

MAX_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head(Wire):
    kind: str
    number: int = 0
    row: int = 0
    name: str = ""
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    engine: int = 0
    policy_version: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    refusal: str | None = None
    deliveries: int = 0
    trouble: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """One turn that is to be sampled."""

    number: int
    """Of the rank's turns; the answer bears it."""
    row: int
    """Of the rank's rows: turns of a row go to the same engine where they can."""
    name: str
    """For messages."""
    token_ids: np.ndarray
    """[L] int32, everything that was said before."""
    seed: int
    overrides: Mapping[str, Any]
    """Sampling arguments of this turn alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A turn that was sampled, or refused."""

    number: int
    token_ids: np.ndarray
    """[T] int32."""
    logprobs: np.ndarray
    """[T] float32, natural log, of the distribution that was sampled from."""
    engine: int
    """`grpo.rollout.packing.engine_id`."""
    policy_version: int
    num_cached_tokens: int
    """Of what was said before, found in the engine's prefix cache."""
    finish_reason: str | None
    """`stop` or `length`; None where it was refused."""
    refusal: str | None
    """Why no engine takes it."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A new batch of conversations: whatever was asked before is forgotten."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this turn any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """The node has no engine now; what was asked waits until it has one."""

    deliveries: int
    """Of weights, until then: what has come since may have brought engines."""
    trouble: str | None
    """Why it should get no engine again."""


Message = Ask | Answer | Begin | Cancel | Stalled


def encode(message: Message) -> bytes:
    match message:
        case Ask():
            head = _Head(
                kind="ask",
                number=message.number,
                row=message.row,
                name=message.name,
                seed=message.seed,
                overrides=dict(message.overrides),
            )
            return _joined(head, message.token_ids.astype(np.int32).tobytes())
        case Answer():
            head = _Head(
                kind="answer",
                number=message.number,
                engine=message.engine,
                policy_version=message.policy_version,
                num_cached_tokens=message.num_cached_tokens,
                finish_reason=message.finish_reason,
                refusal=message.refusal,
            )
            tokens = message.token_ids.astype(np.int32).tobytes()
            return _joined(head, tokens + message.logprobs.astype(np.float32).tobytes())
        case Begin():
            return _joined(_Head(kind="begin"), b"")
        case Cancel():
            return _joined(_Head(kind="cancel", number=message.number), b"")
        case Stalled():
            return _joined(_Head(kind="stalled", deliveries=message.deliveries, trouble=message.trouble), b"")


def _joined(head: _Head, arrays: bytes) -> bytes:
    text = head.dumps().encode()
    return _LENGTH.pack(len(text)) + text + arrays


def decode(message: bytes) -> Message:
    """What `encode` was given.

    Raises:
        ValueError: it is no such message.
    """
    if len(message) < _LENGTH.size:
        raise ValueError(f"a message of {len(message)} bytes")
    begin = _LENGTH.size + _LENGTH.unpack_from(message)[0]
    head = _Head.loads(message[_LENGTH.size : begin])
    match head.kind:
        case "ask":
            return Ask(
                number=head.number,
                row=head.row,
                name=head.name,
                token_ids=np.frombuffer(message, np.int32, offset=begin),
                seed=head.seed,
                overrides=head.overrides,
            )
        case "answer":
            size = (len(message) - begin) // 8
            return Answer(
                number=head.number,
                token_ids=np.frombuffer(message, np.int32, size, begin),
                logprobs=np.frombuffer(message, np.float32, size, begin + 4 * size),
                engine=head.engine,
                policy_version=head.policy_version,
                num_cached_tokens=head.num_cached_tokens,
                finish_reason=head.finish_reason,
                refusal=head.refusal,
            )
        case "begin":
            return Begin()
        case "cancel":
            return Cancel(head.number)
        case "stalled":
            return Stalled(head.deliveries, head.trouble)
    raise ValueError(f"a message of the kind {head.kind!r}")


class Pipe:
    """Messages over a socket, one thread for each direction."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Message) -> None:
        """Raises OSError when the other side is gone."""
        text = encode(message)
        self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def receive(self) -> Message:
        """Raises EOFError, OSError or ValueError when there will be no more."""
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if size > MAX_BYTES:
            raise ValueError(f"a message of {size} bytes")
        return decode(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            if not (chunk := self._socket.recv(min(size - len(received), 1 << 20))):
                raise EOFError("the other side is gone")
            received += chunk
        return bytes(received)

    def close(self) -> None:
        """Wakes whoever waits in `receive`. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
