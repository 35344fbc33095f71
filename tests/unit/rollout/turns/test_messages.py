"""What goes between ranks and their node's broker."""

import os
import socket
from dataclasses import replace

import numpy as np
import pytest

from grpo.rollout.turns.messages import MAX_BYTES, Answer, Ask, Cancel, Message, OutOfEngines, Pipe


def test_pipe_messages_round_trip_and_bad_ones_raise() -> None:
    ask = Ask(
        number=3,
        place=4,
        order=2,
        name="turn",
        token_ids=np.array([7, 8], np.int32),
        seed=2**62,
        overrides={"stop": ["é"]},
    )
    answer = Answer(
        number=3,
        token_ids=np.array([1, 2, 3], np.int32),
        logprobs=np.array([-0.5, -1.5, -2.5], np.float32),
        engine=1025,
        policy_version=7,
        num_cached_tokens=16,
        finish_reason="stop",
        refusal=None,
    )
    refused = replace(answer, token_ids=np.empty(0), logprobs=np.empty(0), finish_reason=None, refusal="too long")
    ours, theirs = socket.socketpair()
    sender, receiver = Pipe(ours), Pipe(theirs)

    def arrived(message: Message) -> Message:
        sender.send(message)
        return receiver.receive()

    for message in (ask, answer, refused):
        again = arrived(message)
        for name in message.__slots__:
            assert np.array_equal(getattr(again, name), getattr(message, name)), name
    for signal in (Cancel(7), OutOfEngines(3, None), OutOfEngines(3, "why")):
        assert arrived(signal) == signal
    text = ask.dumps().encode()
    lacking, spoilt = text.replace(b'"place":4,', b""), text.replace(b'"token_ids":"', b'"token_ids":"!')
    for nonsense in (b"", b"\xff\xff\xff\xff", text[:9], lacking, spoilt, os.urandom(64)):
        ours.sendall(len(nonsense).to_bytes(4) + nonsense)
        with pytest.raises(ValueError, match="of this version"):
            receiver.receive()
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_pipe_with_too_long_message_raises() -> None:
    ours, theirs = socket.socketpair()
    receiver = Pipe(theirs)
    ours.sendall((MAX_BYTES + 1).to_bytes(4))
    with pytest.raises(OSError, match="bad message length"):
        receiver.receive()
    receiver.close()
    ours.close()
