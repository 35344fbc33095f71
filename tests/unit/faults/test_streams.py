"""What users' code prints in one call is that call's, and the streams are what they were when no call is under way."""

import asyncio
import contextlib
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType
from unittest import mock

import pytest

from grpo.faults import users_code
from grpo.faults.users_code import Worker, own_streams
from tests.support.launching import ROOT

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """Each test leaves `sys` as it was."""
    before = sys.stdout, sys.stderr, sys.stdin, threading.Thread.start
    users_code._warned.clear()
    of_others = dict(users_code._calls)  # threads that users' code of another test has left alone
    yield
    assert before == (sys.stdout, sys.stderr, sys.stdin, threading.Thread.start)
    assert not any(isinstance(vars(sys)[name], users_code._Stream) for name in users_code._NAMES)
    assert type(sys) is ModuleType
    assert users_code._calls.items() <= of_others.items()


def in_thread(call: Callable[[], object], name: str = "tool") -> "Future[object]":
    def run() -> object:
        with own_streams(name):
            return call()

    return Worker("test").run(run)


def run_program(source: str, **names: object) -> str:
    """As most code interpreters for models do."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(source, names)
    return out.getvalue()


class Turns:
    """Threads that go on one after the other, in a given order of their names."""

    def __init__(self, *order: str) -> None:
        self._order, self._changed = list(order), threading.Condition()

    def __call__(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._order or self._order[0] == name, PATIENCE_S)
            self._order[:1] = []
            self._changed.notify_all()


PROGRAM = "turn(name)\nprint('begin', name)\nturn(name)\nprint('end', name)\nturn(name)"


def test_own_streams_of_parallel_calls_stay_separate(capsys: pytest.CaptureFixture[str]) -> None:
    turn = Turns("a", "b", "main", "a", "b", "a", "main", "b")
    a, b = (in_thread(lambda name=name: run_program(PROGRAM, turn=turn, name=name)) for name in "ab")
    for number in range(2):
        turn("main")
        print("a line of the log", number)
    assert [each.result(PATIENCE_S) for each in (a, b)] == ["begin a\nend a\n", "begin b\nend b\n"]
    assert capsys.readouterr().out == "a line of the log 0\na line of the log 1\n"


def test_own_streams_keep_redirect_of_main_thread() -> None:
    turn = Turns("tool", "main", "main", "tool", "tool", "main")
    program = "print(1)\nturn('tool')\nturn('tool')\nprint(2)\nturn('tool')"
    collected = in_thread(lambda: run_program(program, turn=turn))
    turn("main")
    with contextlib.redirect_stdout(io.StringIO()) as mine:
        assert sys.stdout is mine
        print("mine")
        turn("main")
        turn("main")
        of_no_call = threading.Thread(target=print, args=["another thread"])
        of_no_call.start()
        of_no_call.join()
    assert collected.result(PATIENCE_S) == "1\n2\n"
    assert mine.getvalue() == "mine\nanother thread\n"


def test_own_streams_ending_during_main_redirect_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    turn = Turns("tool", "main", "main", "tool")
    collected = in_thread(lambda: run_program("print(1)\nturn('tool')\nturn('tool')", turn=turn))
    turn("main")
    with contextlib.redirect_stdout(io.StringIO()) as mine:
        turn("main")
        assert collected.result(PATIENCE_S) == "1\n"
    assert (mine.getvalue(), caplog.messages) == ("", [])


def test_own_streams_nest_redirects() -> None:
    def call() -> list[str]:
        outer, inner = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(outer), contextlib.redirect_stderr(outer):
            with contextlib.redirect_stdout(inner):
                print("inner")
                print("error", file=sys.stderr)
            print("outer")
            with contextlib.redirect_stdout(None):
                print("nowhere", flush=True)
        return [outer.getvalue(), inner.getvalue()]

    assert in_thread(call).result(PATIENCE_S) == ["error\nouter\n", "inner\n"]


def test_own_streams_collect_assigned_stdout() -> None:
    def call() -> str:
        before, sys.stdout = sys.stdout, io.StringIO()
        print("mine")
        out, sys.stdout = sys.stdout, before
        return out.getvalue()

    assert in_thread(call).result(PATIENCE_S) == "mine\n"


def test_own_streams_with_mock_patch_restore_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """It looks into the namespace of `sys`. In a call, and meanwhile in the main thread."""
    turn = Turns("tool", "main", "tool")

    def call() -> str:
        with mock.patch("sys.stdout", new_callable=io.StringIO) as out:
            print("mine")
            turn("tool")
            turn("tool")
        print("after")
        return out.getvalue()

    collected = in_thread(call)
    with mock.patch("sys.stdout", new_callable=io.StringIO) as out:
        print("main")
        turn("main")
    print("main, after")
    assert collected.result(PATIENCE_S) == "mine\n"
    assert out.getvalue().startswith("main\n")
    assert sorted(capsys.readouterr().out.splitlines() + out.getvalue().splitlines()) == [
        "after",
        "main",
        "main, after",
    ]


def test_own_streams_read_input_from_patched_stdin() -> None:
    def call() -> list[str]:
        with mock.patch("sys.stdin", io.StringIO("1\n2\n")):
            return [input(), sys.stdin.readline()]

    assert in_thread(call).result(PATIENCE_S) == ["1", "2\n"]


def test_own_streams_pickle_sys_as_module() -> None:
    """By what sends functions to other processes, with the modules that they use."""
    assert in_thread(lambda: pickle.loads(pickle.dumps(sys))).result(PATIENCE_S) is sys


@pytest.mark.parametrize("where", ["worker", "main"])
def test_own_streams_with_stream_left_restore_it_and_warn_once(where: str, caplog: pytest.LogCaptureFixture) -> None:
    before = sys.stdout

    def leaves() -> None:
        sys.stdout = io.StringIO()

    def in_main() -> None:
        with own_streams("tool python"):
            leaves()

    with caplog.at_level(logging.WARNING, "grpo"):
        for _ in range(2):
            if where == "main":
                in_main()
            else:
                in_thread(leaves, "tool python").result(PATIENCE_S)
            assert sys.stdout is before
    assert [record.getMessage() for record in caplog.records] == [
        "tool python has left another sys.stdout in place, which is put back: redirect within the call, by "
        "contextlib.redirect_stdout, say"
    ]


def test_own_streams_with_stdout_restored_warn_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def call() -> None:
        before, sys.stdout = sys.stdout, io.StringIO()
        sys.stdout = before

    in_thread(call).result(PATIENCE_S)
    assert not caplog.records


def test_own_streams_include_threads_of_call(capsys: pytest.CaptureFixture[str]) -> None:
    """As a judge that bounds a program's time by joining a thread does; one that goes on is the process's again."""
    goes_on, ended = threading.Event(), threading.Event()

    def program() -> None:
        print("in time")
        goes_on.wait(PATIENCE_S)
        print("too late")
        ended.set()

    def call() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            threading.Thread(target=program, daemon=True).start()
            inner = threading.Thread(target=print, args=["another"])
            inner.start()
            inner.join()
        return out.getvalue()

    collected = str(in_thread(call).result(PATIENCE_S))
    goes_on.set()
    assert ended.wait(PATIENCE_S)
    assert sorted(collected.split("\n")) == ["", "another", "in time"]
    assert capsys.readouterr().out == "too late\n"


def test_own_streams_of_event_loop_task_stay_separate(capsys: pytest.CaptureFixture[str]) -> None:
    turn = Turns("task", "main", "task")

    async def task() -> str:
        with own_streams("task"), contextlib.redirect_stdout(io.StringIO()) as out:
            print("first")
            await asyncio.to_thread(turn, "task")
            await asyncio.to_thread(turn, "task")
        return out.getvalue()

    collected = Worker("test").run(lambda: asyncio.run(task()))
    turn("main")
    print("main")
    assert collected.result(PATIENCE_S) == "first\n"
    assert capsys.readouterr().out == "main\n"


def test_own_streams_after_specialised_reads_return_stream_of_call() -> None:
    """The interpreter specialises what runs often to modules as they usually are."""

    def stream() -> object:
        return sys.stdout

    before = {id(stream()) for _ in range(10_000)}
    out = io.StringIO()

    def call() -> bool:
        with contextlib.redirect_stdout(out):
            return all(stream() is out for _ in range(10_000))

    assert in_thread(call).result(PATIENCE_S)
    assert before == {id(stream())}


FORKS = """
import contextlib, io, os, sys, threading
from types import ModuleType
from grpo.faults.users_code import own_streams

def child(check):
    if (pid := os.fork()) == 0:
        try:
            check()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

held, ends = threading.Event(), threading.Event()

def holds():
    with own_streams("held"), contextlib.redirect_stdout(io.StringIO()):
        held.set()
        ends.wait(60)

def in_the_call(out):
    def check():
        print("in the child")
        assert sys.stdout is out and type(sys) is ModuleType, sys.stdout
        assert out.getvalue() == "in the child\\n"
        with own_streams("again"), contextlib.redirect_stdout(io.StringIO()) as inner:
            print("inner")
        assert inner.getvalue() == "inner\\n" and sys.stdout is out
    return check

def calls(statuses):
    with own_streams("forks"), contextlib.redirect_stdout(io.StringIO()) as out:
        statuses.append(child(in_the_call(out)))

def calls_well():
    inner = []
    calls(inner)
    assert inner == [0]

def beside():
    assert type(sys) is ModuleType and sys.stdout is vars(sys)["stdout"] is sys.__stdout__

other = threading.Thread(target=holds)
other.start()
held.wait(60)
statuses = [child(beside)]
from grpo.faults import users_code
with users_code._lock:
    statuses.append(child(calls_well))
forks = threading.Thread(target=calls, args=[statuses])
forks.start()
forks.join()
ends.set()
other.join()
assert type(sys) is ModuleType and sys.stdout is vars(sys)["stdout"] is sys.__stdout__
print(statuses)
"""


def test_own_streams_in_forked_child_match_forking_thread() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ}
    )
    assert ended.stdout == "[0, 0, 0]\n", ended.stderr
