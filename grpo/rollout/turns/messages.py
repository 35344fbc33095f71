"""What a rank and its node's broker say to each other, as JSON: nothing is unpickled."""

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
    """One turn that is to be sampled."""

    number: int
    """Of the rank's turns; the answer bears it."""
    place: int
    """Of the row among all that are under way: its turns go to the same engine where they can."""
    order: int
    """As `grpo.rollout.batch.Batch` has it."""
    name: str
    """For messages."""
    token_ids: TokenIds
    """[L] int32, everything that was said before."""
    seed: int
    overrides: Mapping[str, Any]
    """Sampling arguments of this turn alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer(Wire):
    """A turn that was sampled, or refused."""

    number: int
    token_ids: TokenIds
    """[T] int32."""
    logprobs: Logprobs
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
class Cancel(Wire):
    """Nobody waits for this turn any more."""

    number: int


@dataclass(frozen=True, slots=True)
class OutOfEngines(Wire):
    """The node has no engine now; what was asked waits until it has one."""

    deliveries: int
    """Of weights, until then: what has come since may have brought engines."""
    trouble: str | None
    """Why it should get no engine again."""


# Distinguished by their fields, of which none has a default; the long ones first.
Message = Annotated[Ask | Answer | Cancel | OutOfEngines, Field(union_mode="left_to_right")]


class Pipe:
    """Messages over a socket, one thread for each direction; framed as an engine's are."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._framed = Connection(os.dup(connection.fileno()))  # which ends with this object

    def send(self, message: Message) -> None:
        """Raises OSError when the other side is gone."""
        self._framed.send_bytes(message.dumps().encode())

    def receive(self) -> Message:
        """Raises EOFError, OSError or ValueError when there will be no more."""
        return from_json(self._framed.recv_bytes(MAX_BYTES), Message)

    def close(self) -> None:
        """Wakes whoever waits in `receive`. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
