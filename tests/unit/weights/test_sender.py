"""The thread that announces a weight sync to the engines while its buckets are filled, over scripted engines."""

import threading
from typing import Any

import pytest
import torch

from grpo.engine.client import EngineError
from grpo.weights import sender as sender_module
from grpo.weights.buckets import NUM_BUFFERS, Bucket, ParamMeta
from grpo.weights.sender import Sender

BUCKETS = [
    Bucket(parameters=(), metas=(ParamMeta(f"w{number}", torch.float32, (1,)), ParamMeta(f"v{number}", torch.int8, ())))
    for number in range(NUM_BUFFERS + 3)
]
WAIT_S = 30.0


class ScriptedTransport:
    """Buffers that hold nothing, over which `ScriptedEngines` hear of buckets; records what was started."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.num_taken = 0
        self.aborted = threading.Event()
        self.changed = threading.Condition()

    def begin(self) -> None: ...

    def places(self, number: int, bucket: Bucket) -> list[torch.Tensor]:
        return [torch.tensor(number % NUM_BUFFERS)]

    def start_sending(self, number: int, bucket: Bucket) -> None:
        with self.changed:
            self.started.append(number)
            self.changed.notify_all()

    def is_taken(self, number: int, wait_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.num_taken > number, wait_s)

    def end(self) -> None: ...

    def abort(self) -> None:
        self.aborted.set()
        with self.changed:
            self.changed.notify_all()


class ScriptedEngines:
    """Take buckets one by one, when they are let, until the one at which they refuse."""

    def __init__(self, transport: ScriptedTransport, refuses_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self.info: dict[str, Any] = {}
        self.may_take = threading.Semaphore(0)
        self._transport, self._refuses_at = transport, refuses_at

    def pause(self) -> None:
        self.calls.append("pause")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any], timeout_s: float) -> None:
        self.calls.append("update")
        self.info = info
        for number in range(len(info["sizes"])):
            while not self.may_take.acquire(timeout=0.05):
                if self._transport.aborted.is_set():
                    raise EngineError("the trainer has given the weight sync up")
            if number == self._refuses_at:
                raise EngineError("does not take it")
            with self._transport.changed:
                assert self._transport.changed.wait_for(
                    lambda count=number: len(self._transport.started) > count, WAIT_S
                )
                self._transport.num_taken += 1
                self._transport.changed.notify_all()

    def late(self, what: str) -> EngineError:
        return EngineError(f"engine 0 {what}")


def sender_of(
    refuses_at: int | None = None, num_buckets: int = len(BUCKETS), timeout_s: float = WAIT_S, pauses: bool = False
) -> tuple[Sender, ScriptedTransport, ScriptedEngines]:
    transport = ScriptedTransport()
    engines = ScriptedEngines(transport, refuses_at)
    sender = Sender(
        transport,  # type: ignore[arg-type]
        engines,  # type: ignore[arg-type]
        BUCKETS[:num_buckets],
        held=["kept"],
        sums_bits=True,
        timeout_s=timeout_s,
        pause=engines.pause if pauses else None,
    )
    return sender, transport, engines


def sent(sender: Sender, buckets: list[Bucket]) -> list[int | None]:
    """In which buffers they stood."""
    used: list[int | None] = []
    for bucket in buckets:
        places = sender.places(bucket)
        used.append(None if places is None else int(places[0]))
        if places is not None:
            sender.send(bucket)
    return used


def test_sender_of_many_buckets_makes_one_call_and_waits_for_buffers() -> None:
    sender, transport, engines = sender_of()
    assert sent(sender, BUCKETS[:NUM_BUFFERS]) == [*range(NUM_BUFFERS)]  # nothing has been taken yet
    freed = threading.Event()
    waiting = threading.Thread(target=lambda: (sender.places(BUCKETS[NUM_BUFFERS]), freed.set()))
    waiting.start()
    assert not freed.wait(0.3)
    engines.may_take.release()
    assert freed.wait(5)
    waiting.join()
    engines.may_take.release(len(BUCKETS))
    assert sent(sender, BUCKETS[NUM_BUFFERS:]) == [number % NUM_BUFFERS for number in range(NUM_BUFFERS, len(BUCKETS))]
    assert sender.finish(lambda: engines.calls.append("finish")) is None
    assert engines.calls == ["start", "update", "finish"]
    assert transport.started == [*range(len(BUCKETS))]
    assert engines.info["names"] == [meta.name for bucket in BUCKETS for meta in bucket.metas]
    assert engines.info["shapes"][:2] == [[1], [1]]
    assert (engines.info["sizes"], engines.info["held"], engines.info["sums_bits"]) == ([2] * 6, ["kept"], True)
    assert sender.send_s > 0.2


def test_sender_after_engine_refusal_stops_and_keeps_error() -> None:
    sender, transport, engines = sender_of(refuses_at=1)
    engines.may_take.release(10)
    used = sent(sender, BUCKETS)
    error = sender.finish(lambda: engines.calls.append("finish"))
    assert str(error) == "does not take it"
    assert engines.calls == ["start", "update"]  # and no finish
    assert len(transport.started) <= 1 + NUM_BUFFERS
    assert used[-1] is None


def test_sender_finish_after_non_engine_error_raises_it() -> None:
    sender, _, engines = sender_of(num_buckets=1, pauses=True)

    def break_off(info: dict[str, Any], timeout_s: float) -> None:
        raise OSError("handle is closed")

    engines.update_weights = break_off  # type: ignore[method-assign]
    sent(sender, BUCKETS[:1])
    with pytest.raises(OSError, match="handle is closed"):
        sender.finish(lambda: engines.calls.append("finish"))
    assert engines.calls == ["pause", "start"]


def test_sender_after_broken_broadcast_reports_engine_error() -> None:
    sender, transport, engines = sender_of(refuses_at=0)

    def fail(number: int, bucket: Bucket) -> None:
        engines.may_take.release()
        raise EngineError("NCCL error")

    transport.start_sending = fail  # type: ignore[method-assign]
    sender.send(BUCKETS[0])
    assert str(sender.finish(lambda: None)) == "does not take it"
    assert transport.aborted.is_set()


def test_sender_with_bucket_not_taken_gives_up_at_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "POLL_S", 0.05)
    sender, transport, engines = sender_of(timeout_s=0.3)
    engines.may_take.release()
    used = sent(sender, BUCKETS)
    error = sender.finish(lambda: engines.calls.append("finish"))
    assert str(error) == f"engine 0 has not taken bucket 2 of {len(BUCKETS)} within 0 s"  # not that it was given up
    assert transport.aborted.is_set()
    assert engines.calls == ["start", "update"]
    assert used == [0, 1, 2, 0, None, None]


def test_sender_with_last_bucket_not_loaded_gives_up_at_deadline() -> None:
    sender, transport, engines = sender_of(num_buckets=1, timeout_s=0.3, pauses=True)
    update = engines.update_weights

    def hang(info: dict[str, Any], timeout_s: float) -> None:
        update(info, timeout_s)
        assert transport.aborted.wait(WAIT_S)
        raise EngineError("was aborted")

    engines.update_weights = hang  # type: ignore[method-assign]
    engines.may_take.release()
    sent(sender, BUCKETS[:1])
    assert str(sender.finish(lambda: None)) == "engine 0 has not loaded the last bucket within 0 s"


def test_sender_after_abandon_sends_nothing() -> None:
    sender, transport, _ = sender_of()
    sent(sender, BUCKETS[:NUM_BUFFERS])
    sender.abandon(KeyboardInterrupt())
    assert transport.aborted.is_set()
    sender.abandon(KeyboardInterrupt())  # twice does no harm
    sender._thread.shutdown()  # it has come to an end
    assert sender.places(BUCKETS[0]) is None
    assert transport.started == [*range(NUM_BUFFERS)]


@pytest.mark.parametrize("num_buckets", [0, 2])
def test_sender_with_pause_asks_engines_only_after_first_fill(num_buckets: int) -> None:
    sender, _, engines = sender_of(num_buckets=num_buckets, pauses=True)
    engines.may_take.release(1 + num_buckets)
    for number, bucket in enumerate(BUCKETS[:num_buckets]):
        assert sender.places(bucket) is not None
        assert number or engines.calls == []
        sender.send(bucket)
    assert sender.finish(lambda: engines.calls.append("finish")) is None
    assert engines.calls == ["pause", "start", *["update"][:num_buckets], "finish"]


def test_sender_over_broken_transport_does_not_pause_engines() -> None:
    class Broken(ScriptedTransport):
        def begin(self) -> None:
            raise EngineError("the weight sync group was ended")

    transport = Broken()
    engines = ScriptedEngines(transport)
    sender = Sender(
        transport,  # type: ignore[arg-type]
        engines,  # type: ignore[arg-type]
        BUCKETS,
        held=[],
        sums_bits=False,
        timeout_s=5.0,
        pause=engines.pause,
    )
    assert str(sender.finish(lambda: None)) == "the weight sync group was ended"
    assert engines.calls == []
