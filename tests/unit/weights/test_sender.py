"""The thread that sends buckets while others are filled, over scripted engines."""

import threading
from typing import Any

import pytest
import torch

from grpo.engine.client import EngineError
from grpo.weights.buckets import NUM_BUFFERS
from grpo.weights.sender import Sender


class ScriptedTransport:
    """A transport whose buffers hold nothing; records what was started."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.started: list[int] = []
        self.aborted = False

    def begin(self) -> None: ...

    def places(self, index: int, bucket: Any) -> list[torch.Tensor]:
        return [torch.tensor(index)]

    def update_info(self, index: int, bucket: Any) -> dict[str, Any]:
        return {"names": [bucket], "buffer": index}

    def start_sending(self, index: int, bucket: Any) -> None:
        self.started.append(index)

    def end(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


class ScriptedEngines:
    """Engines that answer an update when they are let, and refuse the one of bucket `refuses`."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[Any] = []
        self.may_answer = threading.Semaphore(0)
        self._refuses = refuses

    def pause(self) -> None:
        self.calls.append("pause")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        assert self.may_answer.acquire(timeout=30)
        self.calls.append((info["names"][0], info["buffer"], tuple(info["held"])))
        if info["names"] == [self._refuses]:
            raise EngineError("does not take it")


def sender_of(engines: ScriptedEngines, in_flight: int = 1) -> tuple[Sender, ScriptedTransport]:
    transport = ScriptedTransport(in_flight)
    return Sender(transport, engines, held=["kept"], sums_bits=False, timeout_s=5.0), transport  # type: ignore[arg-type]


def test_buckets_are_filled_while_others_are_sent_and_no_buffer_before_its_answer() -> None:
    engines = ScriptedEngines()
    sender, transport = sender_of(engines)
    for index in range(NUM_BUFFERS):
        assert sender.places("any") == [index]  # type: ignore[arg-type]  # nothing has been answered yet
        sender.send(f"bucket {index}")  # type: ignore[arg-type]
    freed = threading.Event()
    waiting = threading.Thread(target=lambda: (sender.places("any"), freed.set()))
    waiting.start()
    assert not freed.wait(0.3)
    engines.may_answer.release()
    assert freed.wait(5)
    waiting.join()
    sender.send("bucket 3")  # type: ignore[arg-type]
    engines.may_answer.release(NUM_BUFFERS)
    assert sender.finish(lambda: engines.calls.append("finish")) is None
    buffers = [*range(NUM_BUFFERS), 0]
    updates = [(f"bucket {k}", buffer, ("kept",) if k == 0 else ()) for k, buffer in enumerate(buffers)]
    assert engines.calls == ["start", *updates, "finish"]
    assert transport.started == buffers
    assert sender.busy_s > 0.2


def test_the_next_update_waits_at_the_engines_while_one_is_loaded() -> None:
    engines = ScriptedEngines()
    under_way = threading.Barrier(2)

    def update(info: dict[str, Any]) -> None:
        under_way.wait(5)  # broken unless two updates are there at once
        engines.calls.append(info["names"][0])

    engines.update_weights = update  # type: ignore[method-assign]
    sender, _ = sender_of(engines, in_flight=2)
    for index in range(4):
        assert sender.places("any") is not None  # type: ignore[arg-type]
        sender.send(f"bucket {index}")  # type: ignore[arg-type]
    assert sender.finish(lambda: engines.calls.append("finish")) is None
    assert (engines.calls[0], engines.calls[-1]) == ("start", "finish")
    assert sorted(engines.calls[1:-1]) == [f"bucket {index}" for index in range(4)]
    assert 0 < sender.busy_s < 5


def test_after_a_refusal_nothing_more_is_sent_and_the_error_is_kept() -> None:
    engines = ScriptedEngines(refuses="bucket 1")
    engines.may_answer.release(10)
    sender, _ = sender_of(engines)
    sent = 0
    for index in range(NUM_BUFFERS + 3):
        if sender.places("any") is not None:  # type: ignore[arg-type]
            sender.send(f"bucket {index}")  # type: ignore[arg-type]
            sent += 1
    error = sender.finish(lambda: engines.calls.append("finish"))
    assert isinstance(error, EngineError)
    assert [call[0] for call in engines.calls[1:]] == ["bucket 0", "bucket 1"]  # and no finish
    assert sent <= 1 + NUM_BUFFERS


def test_the_first_of_two_refusals_is_the_cause() -> None:
    engines = ScriptedEngines()
    under_way, second_failed = threading.Barrier(2), threading.Event()

    def update(info: dict[str, Any]) -> None:
        under_way.wait(5)
        if info["names"] == ["bucket 0"]:
            assert second_failed.wait(5)
            raise EngineError("does not take it")
        threading.Timer(0.2, second_failed.set).start()
        raise EngineError("no update is under way")

    engines.update_weights = update  # type: ignore[method-assign]
    sender, _ = sender_of(engines, in_flight=2)
    sender.send("bucket 0")  # type: ignore[arg-type]
    sender.send("bucket 1")  # type: ignore[arg-type]
    assert str(sender.finish(lambda: None)) == "does not take it"


def test_a_push_that_is_given_up_sends_nothing_more() -> None:
    engines = ScriptedEngines()
    sender, transport = sender_of(engines)
    for index in range(NUM_BUFFERS):
        sender.send(f"bucket {index}")  # type: ignore[arg-type]
    sender.abandon(KeyboardInterrupt())
    assert transport.aborted
    engines.may_answer.release(NUM_BUFFERS)
    sender.abandon(KeyboardInterrupt())  # twice does no harm
    sender._threads.shutdown()
    assert engines.calls[1:] in ([], [("bucket 0", 0, ("kept",))])  # what was under way


@pytest.mark.parametrize("num_buckets", [0, 2])
def test_engines_that_are_paused_are_asked_for_nothing_before_a_bucket_is_filled(num_buckets: int) -> None:
    engines = ScriptedEngines()
    for _ in range(num_buckets):
        engines.may_answer.release()
    sender = Sender(
        ScriptedTransport(1),
        engines,  # type: ignore[arg-type]
        held=["kept"],
        sums_bits=False,
        timeout_s=5.0,
        pause=engines.pause,
    )
    for index in range(num_buckets):
        assert sender.places("any") == [index]  # type: ignore[arg-type]
        assert index or engines.calls == []
        sender.send(f"bucket {index}")  # type: ignore[arg-type]
    assert sender.finish(lambda: engines.calls.append("finish")) is None
    assert [call[0] for call in engines.calls[2:-1]] == [f"bucket {index}" for index in range(num_buckets)]
    assert [*engines.calls[:2], engines.calls[-1]] == ["pause", "start", "finish"]


def test_engines_are_not_paused_for_a_transport_that_is_broken() -> None:
    class Broken(ScriptedTransport):
        def begin(self) -> None:
            raise EngineError("the push group was ended")

    engines = ScriptedEngines()
    sender = Sender(
        Broken(1),
        engines,  # type: ignore[arg-type]
        held=[],
        sums_bits=False,
        timeout_s=5.0,
        pause=engines.pause,
    )
    assert str(sender.finish(lambda: None)) == "the push group was ended"
    assert engines.calls == []
