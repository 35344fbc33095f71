"""Programs that mean no good, in the sandbox and with limits alone; small limits, for the machine is shared."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from grpo.ops.train import sandbox
from grpo.ops.train.checks import check_arguments
from grpo.ops.train.sandbox import Outcome, must_isolate
from grpo.ops.train.sandbox_group import PREFIX, own_place
from tests.support.sandboxed import SMALL, outcome

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_run_program_returns_output_and_exit_code(isolated: bool) -> None:
    ended = outcome("import sys, json\nprint(sum(map(int, sys.stdin.read().split())))", isolated, b"1 2\n39\n")
    assert ended == Outcome(code=0, output=b"42\n")
    assert outcome("raise SystemExit(3)", isolated).code == 3
    assert outcome("1/0", isolated).code == 1
    assert outcome("print('ä\\ud800')", isolated).code == 1, "a broken text is the program's own error"


def test_sandbox_with_python_below_its_folders_runs_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_run_program_without_end_stops_at_cpu_and_wall_limits(isolated: bool) -> None:
    assert outcome("while True: pass", isolated, cpu_s=1).code == -9
    begun = time.monotonic()
    ended = outcome("import time\ntime.sleep(600)", isolated, wall_s=0.5)
    assert (ended.code, ended.why) == (None, "late")
    assert time.monotonic() - begun < 15


def test_run_program_with_huge_allocation_raises_inside_program(isolated: bool) -> None:
    ended = outcome("try:\n  bytearray(10**11)\nexcept MemoryError:\n  print('no')", isolated)
    assert ended.output == b"no\n"


def test_run_program_beyond_output_limit_cuts_output_and_ends(isolated: bool) -> None:
    ended = outcome("for _ in range(1000): print('x' * 100_000)", isolated)  # 100 MB
    assert (ended.code, ended.why, len(ended.output)) == (None, "output", SMALL.output_bytes)


def test_run_program_beyond_file_limit_fails(isolated: bool) -> None:
    ended = outcome("open('big', 'wb').write(bytes(2**21))", isolated)
    assert ended.code != 0
    assert outcome("open('small', 'w').write('x')\nprint(open('small').read())", isolated).output == b"x\n"


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


def test_sandbox_with_forking_program_limits_and_ends_processes() -> None:
    assert must_isolate()
    ended = outcome(FORKS, True)
    assert 0 < int(ended.output) < SMALL.processes
    assert ended.code == 0


def test_run_program_with_detached_child_leaves_no_process(isolated: bool, tmp_path: Path) -> None:
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


def test_sandbox_denies_files_network_and_privileges(tmp_path: Path) -> None:
    assert must_isolate()
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


def test_sandbox_after_trainer_kill_ends(tmp_path: Path) -> None:
    """The one that started it is killed, and can clean nothing up."""
    code = (
        "from grpo.ops.train.sandbox import *\n"
        "print('begun', flush=True)\n"
        "run_program('import time; time.sleep(602.5)', limits=ProgramLimits(wall_s=600))"
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
    own_place.cache_clear()
    if place := own_place():  # what it could not remove goes with the next trainer's first look
        assert not list(place.folder.glob(f"{PREFIX}{trainer.pid}-*"))


REFUSED = Outcome(code=None, output=b"", why="Refused: unshare: Operation not permitted", is_refused=True)


@pytest.mark.usefixtures("nothing_is_known")
def test_must_isolate_without_sandbox_raises_unless_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run_program", lambda *_: REFUSED)
    with pytest.raises(ValueError, match=r"unshare: Operation not permitted.*GRPO-630.*user namespaces.*UNISOLATED=1"):
        must_isolate()
    monkeypatch.setenv(sandbox.UNISOLATED, "1")
    with pytest.warns(UserWarning, match="with limits alone.*unshare: Operation not permitted"):
        assert not must_isolate()
    assert not must_isolate()


@pytest.mark.usefixtures("nothing_is_known")
def test_must_isolate_with_working_sandbox_ignores_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sandbox.UNISOLATED, "1")
    assert must_isolate()
    must_isolate.cache_clear()
    monkeypatch.setenv(sandbox.UNISOLATED, "yes")
    with pytest.raises(ValueError, match=r"GRPO_CODE_REWARD_UNISOLATED is 'yes': write 1"):
        must_isolate()


@pytest.mark.usefixtures("nothing_is_known")
def test_must_isolate_without_seccomp_filter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "seccomp_filter", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"no filter of system calls is known for .*GRPO-630"):
        must_isolate()
    assert outcome("print(42)", isolated=False) == Outcome(code=0, output=b"42\n")


@pytest.mark.usefixtures("nothing_is_known")
def test_check_arguments_of_code_reward_without_sandbox_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run_program", lambda *_: REFUSED)
    monkeypatch.setattr("grpo.ops.train.checks.CHECKS", ())
    script = SimpleNamespace(reward_model_name_or_path=None, reward_funcs=["exact_match", "code_reward"])
    with pytest.raises(ValueError, match="GRPO-630"):
        check_arguments(SimpleNamespace(script=script))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("libc.unshare(NEW_USER |", "libc.unshare(1 << 31 | NEW_USER |"),
        ('"mode=755,size=', '"mode=no number,size='),
        ('_write(f"/proc/{pid}/uid_map", users)', '_write(f"/proc/{pid}/uid_map", "no numbers")'),
    ],
)
@pytest.mark.usefixtures("nothing_is_known")
def test_must_isolate_after_kernel_refusal_raises(
    line: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sandbox._CHILD.read_text()
    assert source.count(line) == 1
    (tmp_path / "child.py").write_text(source.replace(line, broken))
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    with pytest.raises(ValueError, match=r"Invalid argument.*GRPO-630"):
        must_isolate()


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (Outcome(code=None, output=b"", why="late"), "late"),
        (Outcome(code=None, output=b"", why="it was killed"), "it was killed"),
        (Outcome(code=127, output=b""), "exit code 127"),
    ],
)
@pytest.mark.usefixtures("nothing_is_known")
def test_must_isolate_after_failed_trial_raises_and_tries_again(
    ended: Outcome, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's programs would have this user's files and the network in reach, for a machine that was slow once."""
    ends = iter([ended, Outcome(code=0, output=b"42\n")])
    monkeypatch.setattr(sandbox, "run_program", lambda *_: next(ends))
    with pytest.raises(RuntimeError, match=f"sandbox .* failed .*{why}"):
        must_isolate()
    assert must_isolate()
