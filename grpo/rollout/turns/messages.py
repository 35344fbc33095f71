"""Messages between a rank and its node's broker, as JSON: nothing is unpickled."""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated, Any

from pydantic import Field

from grpo.place.wire import Wire, from_json
from grpo.rollout.packing import Logprobs, TokenIds

MAX_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask(Wire):
    """Request for one turn."""

    number: int
    """Number of the turn on this rank; repeated in the answer."""
    place: int
    """Index of the row among all in progress: its turns go to the same engine if possible."""
    order: int
    """Order as in `grpo.rollout.batch.Batch`."""
    name: str
    """Name for messages."""
    token_ids: TokenIds
    """[L] int32, the whole history."""
    seed: int
    overrides: Mapping[str, Any]
    """Sampling arguments of this turn alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer(Wire):
    """A sampled or refused turn."""

    number: int
    token_ids: TokenIds
    """[T] int32."""
    logprobs: Logprobs
    """[T] float32, natural log, of the distribution sampled from."""
    engine: int
    """Id by `grpo.rollout.packing.engine_id`."""
    policy_version: int
    num_cached_tokens: int
    """Tokens of the history found in the engine's prefix cache."""
    finish_reason: str | None
    """`stop` or `length`; None if refused."""
    refusal: str | None
    """Reason of the refusal."""


@dataclass(frozen=True, slots=True)
class Cancel(Wire):
    """Cancels a turn no longer needed."""

    number: int


@dataclass(frozen=True, slots=True)
class OutOfEngines(Wire):
    """The node has no engine now; requests wait until it has one."""

    deliveries: int
    """Number of weight syncs until then; a later one may have brought engines."""
    trouble: str | None
    """Reason why it should get no engine again."""


# Distinguished by their fields, none of which has a default; the long ones first.
Message = Annotated[Ask | Answer | Cancel | OutOfEngines, Field(union_mode="left_to_right")]


class Pipe:
    """Messages over a socket, one thread for each direction; framed like an engine's."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._framed = Connection(os.dup(connection.fileno()))  # closed with this object

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        self._framed.send_bytes(message.dumps().encode())

    def receive(self) -> Message:
        """Receive a message. Raises EOFError, OSError or ValueError at the end."""
        return from_json(self._framed.recv_bytes(MAX_BYTES), Message)

    def close(self) -> None:
        """Close the socket, which wakes a thread in `receive`. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
