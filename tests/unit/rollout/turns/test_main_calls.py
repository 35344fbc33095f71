"""Tools in the main thread: where they run, how they end, and what passes through them."""

import asyncio
import io
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from grpo import in_threads
from grpo.faults.deadlines import raise_in_main_thread
from grpo.faults.failure import FailureRecord, JobFailed
from grpo.faults.users_code import Worker
from grpo.rollout.turns.declared import may_run_in_threads
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.tools import Toolbox, ToolRunner

DEADLINE_S = 20.0
RECORD = FailureRecord(node=1, rank=3, host="far", phase="train", cause="a fault elsewhere")


def answers(
    *rows: Callable[[], Any], check: Callable[[], None] = lambda: None, left_s: float = DEADLINE_S, **runner: Any
) -> list[str]:
    """What the model is reported by the tool of each row; all of them call at once, and this thread serves them."""
    main = MainThread()
    tools = ToolRunner(**{"timeout_s": DEADLINE_S, "main": main, "max_threads": None, "max_abandoned": 4, **runner})
    batch = tools.begin(len(rows))

    async def ask(row: int, tool: Callable[[], Any]) -> str:
        call = {"type": "function", "function": {"name": tool.__name__, "arguments": {}}}
        try:
            (message,) = await batch.run([call], Toolbox(sync={tool.__name__: tool}), row)
        finally:
            batch.turnstile.leave(row)
        return message["content"]

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(row, tool) for row, tool in enumerate(rows)))

    future = Worker("test").run(lambda: asyncio.run(ask_all()))
    future.add_done_callback(lambda _: main.wake())
    while not future.done():
        main.serve(DEADLINE_S, left_s=left_s, check=check)
    return future.result()


def where() -> str:
    return threading.current_thread().name


@in_threads
def anywhere() -> str:
    return threading.current_thread().name


def test_sync_tools_run_in_main_thread_and_declared_ones_in_others() -> None:
    assert answers(where, anywhere, where) == ["MainThread", "grpo-tool", "MainThread"]
    assert answers(where, anywhere, max_threads=2) == ["grpo-tool", "grpo-tool"]


def test_declared_tool_runs_during_call_in_main_thread() -> None:
    """The first row's call is under way until the second row's has returned."""
    returned = threading.Event()

    def waits() -> str:
        return str(returned.wait(DEADLINE_S))

    @in_threads
    def returns() -> str:
        returned.set()
        return "at once"

    assert answers(waits, returns) == ["True", "at once"]


def test_may_run_in_threads_is_true_only_of_declared_code() -> None:
    @in_threads
    class Environment:
        @in_threads
        def declared(self) -> None: ...

        def plain(self) -> None: ...

    class Derived(Environment): ...

    environment = Environment()
    assert may_run_in_threads(anywhere)
    assert may_run_in_threads(Environment)
    assert may_run_in_threads(environment.declared)
    for other in (where, Derived, environment.plain, lambda: anywhere()):
        assert not may_run_in_threads(other)
    with pytest.raises(TypeError, match="in_threads cannot mark <bound method"):
        in_threads(environment.plain)


def test_hanging_tool_is_interrupted_and_others_go_on() -> None:
    said: list[str] = []
    stdout = sys.stdout

    def hangs() -> None:
        sys.stdout = io.StringIO()
        try:
            while True:
                time.sleep(DEADLINE_S)
        except Exception:  # noqa: BLE001  as users write it
            hangs()

    first, second = answers(hangs, where, timeout_s=0.2, say=said.append)
    assert first == "{'error': 'tool hangs has not returned within 0.2 s (tool_timeout)'}"
    assert second == "MainThread"
    (line,) = said
    assert line.endswith("has not returned within 0.2 s (tool_timeout); the model sees it, and it is interrupted")
    assert sys.stdout is stdout


def test_tool_errors_and_exits_are_reported_to_model() -> None:
    def stops() -> None:
        next(iter(()))

    def leaves() -> None:
        sys.exit(3)

    class Own(BaseException): ...

    def raises() -> None:
        raise Own("its own")

    assert answers(stops, leaves, raises) == [
        "{'error': 'StopIteration: '}",
        "{'error': 'SystemExit: 3'}",
        "{'error': 'its own'}",
    ]


def test_keyboard_interrupt_in_tool_ends_batch() -> None:
    def stopped_by_a_person() -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        answers(stopped_by_a_person)


def test_job_failure_during_tool_raises_job_failed() -> None:
    def swallows() -> str:
        try:
            raise_in_main_thread(RECORD)
            while True:
                time.sleep(0.01)
        except Exception:  # noqa: BLE001  as users write it
            return "all is well"

    def check() -> None:
        raise JobFailed(RECORD)

    with pytest.raises(JobFailed, match="a fault elsewhere"):
        answers(swallows, check=check)

    def waits() -> None:
        raise_in_main_thread(RECORD)
        time.sleep(DEADLINE_S)

    with pytest.raises(JobFailed, match="a fault elsewhere"):
        answers(waits)


def test_batch_timeout_ends_hanging_tool_call() -> None:
    def hangs() -> None:
        threading.Event().wait()

    def check() -> None:
        raise TimeoutError("a batch has not ended")

    with pytest.raises(TimeoutError, match="a batch has not ended"):
        answers(hangs, check=check, left_s=0.1)


def test_main_thread_begin_drops_calls_of_earlier_batch() -> None:
    main, called = MainThread(), []
    main.run(lambda: called.append("old"), timeout_s=DEADLINE_S)
    main.begin()
    new = main.run(lambda: called.append("new"), timeout_s=DEADLINE_S)
    given_up = main.run(lambda: called.append("given up"), timeout_s=DEADLINE_S)
    given_up.cancel()
    for _ in range(3):
        main.serve(0, left_s=DEADLINE_S, check=lambda: None)
    assert new.done()
    assert called == ["new"]
