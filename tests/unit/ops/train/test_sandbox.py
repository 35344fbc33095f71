"""Programs that mean no good, in the sandbox and with limits alone; small limits, for the machine is shared."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from grpo.ops.train import sandbox
from grpo.ops.train.sandbox import Limits, Outcome, can_isolate, run_program

SMALL = Limits(wall_s=20, cpu_s=2, memory_bytes=2**28, processes=4, file_bytes=2**20, output_bytes=2**16)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither folders nor processes, whatever a program did."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []
    assert [child.cmdline() for child in psutil.Process().children(recursive=True) if "sandbox" in str(child)] == []


@pytest.fixture(params=[True, False], ids=["isolated", "limits alone"])
def isolated(request: pytest.FixtureRequest) -> bool:
    if request.param and not can_isolate():
        pytest.fail("this machine gives no namespaces, so nothing of the sandbox itself can be tested on it")
    return request.param


def outcome(source: str, isolated: bool, stdin: bytes = b"", **limits: float) -> Outcome:
    return run_program(source, stdin, replace(SMALL, **limits), isolated=isolated)


def test_a_program_reads_and_writes(isolated: bool) -> None:
    ended = outcome("import sys, json\nprint(sum(map(int, sys.stdin.read().split())))", isolated, b"1 2\n39\n")
    assert ended == Outcome(code=0, output=b"42\n")
    assert outcome("raise SystemExit(3)", isolated).code == 3
    assert outcome("1/0", isolated).code == 1
    assert outcome("print('ä\\ud800')", isolated).code == 1, "a broken text is the program's own error"


def test_python_may_lie_where_the_program_gets_its_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Below /tmp, or below /work: this one's own prefix is shown, too, and another one there."""
    child, prefix = tmp_path / "child.py", os.path.realpath(sys.base_prefix)
    own = sandbox._CHILD.read_text()
    child.write_text(own.replace("SEEN = (", f"SEEN = ({prefix!r}, ", 1))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    monkeypatch.setattr(sys, "base_prefix", tempfile.mkdtemp(dir="/tmp"))
    try:
        assert outcome("open('/tmp/mine', 'w').write('it'); print(42)", isolated=True) == Outcome(
            code=0, output=b"42\n"
        )
    finally:
        os.rmdir(sys.base_prefix)


def test_an_endless_loop_has_a_deadline_of_cpu_and_of_wall(isolated: bool) -> None:
    assert outcome("while True: pass", isolated, cpu_s=1).code == -9
    begun = time.monotonic()
    ended = outcome("import time\ntime.sleep(600)", isolated, wall_s=0.5)
    assert (ended.code, ended.why) == (None, "late")
    assert time.monotonic() - begun < 15


def test_a_huge_allocation_fails_alone(isolated: bool) -> None:
    ended = outcome("try:\n  bytearray(10**11)\nexcept MemoryError:\n  print('no')", isolated)
    assert ended.output == b"no\n"


def test_output_is_cut_and_its_writer_ended(isolated: bool) -> None:
    ended = outcome("for _ in range(1000): print('x' * 100_000)", isolated)  # 100 MB
    assert (ended.code, ended.why, len(ended.output)) == (None, "output", SMALL.output_bytes)


def test_files_are_bounded(isolated: bool) -> None:
    ended = outcome("open('big', 'wb').write(bytes(2**21))", isolated)
    assert ended.code != 0
    assert outcome("open('small', 'w').write('x')\nprint(open('small').read())", isolated).output == b"x\n"


def test_a_program_cannot_say_how_it_ended(isolated: bool) -> None:
    source = """
import os
for number in range(3, 64):
    try:
        os.write(number, b'{"code": 0}')
        print(number)
    except OSError:
        pass
raise SystemExit(7)
"""
    assert outcome(source, isolated) == Outcome(code=7, output=b"")


FORKS = """
import os, sys, time
made = 0
try:
    while made < 40:
        if os.fork() == 0:
            time.sleep(600)
        made += 1
except OSError:
    pass
print(made, flush=True)
"""


def test_processes_are_counted_where_there_are_namespaces_and_end_with_the_program() -> None:
    assert can_isolate()
    ended = outcome(FORKS, True)
    assert 0 < int(ended.output) < SMALL.processes
    assert ended.code == 0


def test_a_program_that_forks_and_leaves_its_session_leaves_nobody_behind(isolated: bool, tmp_path: Path) -> None:
    """Its child is in a session of its own and no child of anybody's that waits."""
    leaver = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "601.5"])
    os._exit(0)
os.wait()
print("gone")
"""
    ended = outcome(leaver, isolated)
    assert ended.output == b"gone\n"
    assert not any("601.5" in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))


def test_what_a_sandboxed_program_can_reach(tmp_path: Path) -> None:
    assert can_isolate()
    (tmp_path / "secret").write_text("token")
    os.chmod(tmp_path, 0o777)
    source = f"""
import os, socket
tries = {{
    "read": lambda: open({str(tmp_path / "secret")!r}).read(),
    "write": lambda: open({str(tmp_path / "mine")!r}, "w").write("x"),
    "write to /usr": lambda: open("/usr/mine", "w"),
    "connect": lambda: socket.create_connection(("127.0.0.1", 9), 1),
    "look at processes": lambda: os.listdir("/proc"),
    "kill": lambda: os.kill({os.getpid()}, 0),
    "be root": lambda: os.setuid(0),
    "make namespaces": lambda: __import__("ctypes").CDLL(None).unshare(0x10000000) and 1 / 0,
}}
for name, attempt in tries.items():
    try:
        attempt()
        print(name)
    except (OSError, ZeroDivisionError):
        pass
print(os.environ.get("HOME"), os.getcwd(), len(socket.if_nameindex()))
"""
    ended = outcome(source, True, memory_bytes=2**29)
    assert ended.output.decode().splitlines() == ["None /work 1"], ended
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_it_ends_with_the_trainer(tmp_path: Path) -> None:
    """The one that started it is killed, and can clean nothing up."""
    code = (
        "from grpo.ops.train.sandbox import *\n"
        "print('begun', flush=True)\n"
        "run_program('import time; time.sleep(602.5)', limits=Limits(wall_s=600))"
    )
    root = Path(sandbox.__file__).parents[3]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # of a trainer that is killed: nobody is left to empty it
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, env=env)
    assert trainer.stdout is not None
    trainer.stdout.readline()
    whole = psutil.Process(trainer.pid)
    below: list[psutil.Process] = []
    until = time.monotonic() + 60
    while len(below) < 4 and time.monotonic() < until:
        below = whole.children(recursive=True)
        time.sleep(0.02)
    assert len(below) == 4, below
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


@pytest.fixture
def nothing_is_known() -> Iterator[None]:
    """Of this machine's namespaces, before the test and after it."""
    can_isolate.cache_clear()
    yield
    can_isolate.cache_clear()


@pytest.mark.usefixtures("nothing_is_known")
def test_a_machine_without_namespaces_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(source: str, *_: object) -> Outcome:
        why = "NoNamespaces: unshare: Operation not permitted"
        return Outcome(code=None, output=b"", why=why, has_no_namespaces=True)

    monkeypatch.setattr(sandbox, "run_program", run)
    with pytest.warns(UserWarning, match="with limits alone.*unshare: Operation not permitted.*user namespaces"):
        assert not can_isolate()
    assert not can_isolate()


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("libc.unshare(NEW_USER |", "libc.unshare(1 << 31 | NEW_USER |"),
        ('"mode=755,size=', '"mode=no number,size='),
        ('_write(f"/proc/{pid}/uid_map", users)', '_write(f"/proc/{pid}/uid_map", "no numbers")'),
    ],
)
@pytest.mark.usefixtures("nothing_is_known")
def test_what_the_kernel_refuses_is_no_namespaces(
    line: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sandbox._CHILD.read_text()
    assert source.count(line) == 1
    (tmp_path / "child.py").write_text(source.replace(line, broken))
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    with pytest.warns(UserWarning, match="with limits alone.*Invalid argument"):
        assert not can_isolate()


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (Outcome(code=None, output=b"", why="late"), "late"),
        (Outcome(code=None, output=b"", why="it was killed"), "it was killed"),
        (Outcome(code=127, output=b""), "exit code 127"),
    ],
)
@pytest.mark.usefixtures("nothing_is_known")
def test_a_trial_that_fails_otherwise_opens_nothing(ended: Outcome, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's programs would have this user's files and the network in reach, for a machine that was slow once."""
    ends = iter([ended, Outcome(code=0, output=b"42\n")])
    monkeypatch.setattr(sandbox, "run_program", lambda *_: next(ends))
    with pytest.raises(RuntimeError, match=f"sandbox .* failed .*{why}"):
        can_isolate()
    assert can_isolate()
