"""Programs that attack the job that judges them, each in the way that once worked."""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo.ops.train import sandbox
from grpo.ops.train.sandbox import Outcome
from grpo.ops.train.sandbox_group import GroupPlace
from grpo.ops.train.system_calls import seccomp_filter
from tests.support.sandboxed import living_since, outcome

pytestmark = pytest.mark.usefixtures("nothing_is_left")

READS_THE_PARENT = """
import os
pid = os.getppid()
while pid > 1:
    try:
        found = open(f"/proc/{pid}/environ", "rb").read()
        print([each for each in found.split(b"\\0") if b"HF_TOKEN" in each])
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        break
"""


def test_sandbox_hides_token_in_job_environment() -> None:
    """And where limits are all, which somebody has to have said, it is not: the attack works."""
    script = (
        "import sys\nfrom grpo.ops.train.sandbox import run_program\nfor isolated in (True, False):\n"
        "    print(run_program(sys.argv[1], isolated=isolated).output)"
    )
    env = {**os.environ, "HF_TOKEN": "hf_of_the_rank"}
    command = [sys.executable, "-c", script, READS_THE_PARENT]
    root = Path(sandbox.__file__).parents[3]
    ran = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=True, timeout=300)
    isolated, limits_alone = ran.stdout.splitlines()
    assert isolated == "b''"
    assert "hf_of_the_rank" in limits_alone


def test_run_program_with_keeper_killing_daemon_leaves_no_process(isolated: bool) -> None:
    source = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import ctypes
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        os.close(0), os.close(1)
        time.sleep(600)
    os._exit(0)
os.wait()
try:
    os.kill(os.getppid(), signal.SIGKILL)
except PermissionError:
    pass
time.sleep(0.2)
print("done")
"""
    assert outcome(source, isolated).output.endswith(b"done\n")  # the fixture looks for who is left


MEMORY = """
import ctypes, fcntl, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def resize():
    fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)
calls = {
    "shmget": lambda: call(29, 0, ctypes.c_size_t(1 << 25), 0o1600),
    "msgget": lambda: call(68, 0, 0o1600),
    "semget": lambda: call(64, 0, 8, 0o1600),
    "mq_open": lambda: call(240, b"mine", os.O_CREAT | os.O_RDWR, 0o600, None),
    "memfd_create": lambda: os.memfd_create("x"),
    "memfd_secret": lambda: call(447, 0),
    "a larger pipe": resize,
    "vmsplice": lambda: call(278, os.pipe()[1], None, 0, 0),
    "io_uring_setup": lambda: call(425, 8, bytes(120)),
    "userfaultfd": lambda: call(323, 1),
    "bpf": lambda: call(321, 0, bytes(72), 72),
    "keyctl": lambda: call(250, 0, -3, 1),
    "ptrace": lambda: call(101, 0, 0, 0, 0),
    "x32": lambda: call(0x40000000 + 39),
}
for name, attempt in calls.items():
    try:
        attempt()
        print(name, "works")
    except OSError as error:
        if error.errno != 1:
            print(name, error)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the program are those of x86_64")
def test_system_calls_for_uncounted_memory_are_refused(isolated: bool) -> None:
    """A program held 768 MiB of shared memory, or 600 MiB of memfds, at a limit of 128."""
    assert outcome(MEMORY, isolated) == Outcome(code=0, output=b"")


def test_files_in_memory_are_limited_in_number_and_size() -> None:
    source = """
def fill(size):
    made = 0
    try:
        while made < 20_000:
            with open(f"{size}-{made}", "wb") as file:
                file.write(bytes(size))
            made += 1
    except OSError as error:
        print(made, error.errno)
fill(0)
import os
for name in os.listdir():
    if name.startswith("0-"):
        os.unlink(name)
fill(1 << 16)
"""
    files, full, blocks, full_again = map(int, outcome(source, True).output.split())
    assert full == full_again == 28  # ENOSPC
    assert 1000 < files < 4096
    assert 1 <= blocks <= 16  # of 1 MiB


MANY_PROCESSES = """
import os, time
children = []
for _ in range(8):
    reader, writer = os.pipe()
    children.append(os.fork())
    if not children[-1]:
        held = b"x" * (75 << 20)
        os.write(writer, b"h")
        time.sleep(600)
    os.close(writer)
    os.read(reader, 1)
print(75 * sum(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children))
"""
FILES_IN_MEMORY = """
held = 0
for number in range(8):
    with open(f"{number}", "wb") as file:
        for _ in range(75):
            held += file.write(bytes(1 << 20)) >> 20
print(held)
"""


@pytest.mark.parametrize("source", [MANY_PROCESSES, FILES_IN_MEMORY], ids=["processes", "files"])
def test_control_group_limits_memory_of_processes_and_files_together(
    source: str, place: GroupPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 MiB at a limit of 128, which each process keeps to."""
    limits = {"memory_bytes": 2**27, "file_bytes": 2**30, "processes": 16}
    ended = outcome(source, True, **limits)
    assert (ended.code, ended.why) == (None, "memory")
    assert int(ended.output or 0) <= 128
    monkeypatch.setattr(sandbox, "own_place", lambda: None)
    assert outcome(source, True, **limits) == Outcome(code=0, output=b"600\n"), "without a group the attack works"


def test_pipe_buffers_hold_bounded_memory(isolated: bool) -> None:
    source = """
import os
held = 0
try:
    while True:
        writer = os.pipe()[1]
        os.set_blocking(writer, False)
        try:
            while True:
                held += os.write(writer, bytes(4096))
        except BlockingIOError:
            pass
except OSError:
    print(held)
"""
    assert 0 < int(outcome(source, isolated).output) < 64 * 2**16


SAYS_HOW_IT_ENDED = """
import os
said = b'{"code": 0}\\n'
for number in range(3, 64):
    try:
        os.write(number, said)
        print(number)
    except OSError:
        pass
try:
    keepers = [f"/proc/{os.getppid()}/fd/{number}" for number in os.listdir(f"/proc/{os.getppid()}/fd")]
except OSError:
    keepers = []
for path in keepers:
    try:
        if "pipe" in os.readlink(path) or "socket" in os.readlink(path):
            if os.stat(path).st_ino != os.fstat(1).st_ino:
                os.write(os.open(path, os.O_WRONLY), said)
    except OSError:
        pass
raise SystemExit(7)
"""


def test_outcome_of_program_forging_status_is_unchanged(isolated: bool) -> None:
    """Neither by what it has inherited, nor by what its keeper holds."""
    assert outcome(SAYS_HOW_IT_ENDED, isolated) == Outcome(code=7, output=b"")


@pytest.mark.parametrize("said", [b"no JSON", b'{"code": 0}{"code": 0}', b"[" * 60_000, b"42", b"\xff", b""])
def test_outcome_with_malformed_status_is_killed(said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_by(f"os.write(json.loads(sys.argv[1])['status_fd'], {said!r})", tmp_path, monkeypatch)
    assert outcome("", True) == Outcome(code=None, output=b"", why="it was killed")


def test_outcome_with_withheld_status_is_killed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that counts is gone, and another holds its socket."""
    answer_by("os.fork() or (os.close(1), __import__('time').sleep(600))", tmp_path, monkeypatch)
    before = set(psutil.Process().children(recursive=True))
    begun = time.monotonic()
    assert outcome("", True).why == "it was killed"
    assert time.monotonic() - begun < 300
    assert len(living_since(before)) == 1


def answer_by(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are kept by this line in the place of the sandbox."""
    (folder / "child.py").write_text(f"import json, os, sys\n{line}")
    monkeypatch.setattr(sandbox, "_CHILD", folder / "child.py")


def test_stdin_of_program_is_read_only(isolated: bool) -> None:
    source = """
import os
print(os.read(0, 9))
try:
    os.write(0, b"x")
except OSError as error:
    print(error.errno)
"""
    assert outcome(source, isolated, b"given").output == b"b'given'\n9\n"


def test_sandbox_without_mount_setattr_mounts_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 5.12."""
    own = sandbox._CHILD.read_text()
    assert own.count("MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY_NOSUID = 442") == 1
    (tmp_path / "child.py").write_text(own.replace("READ_ONLY_NOSUID = 442", "READ_ONLY_NOSUID = 9999"))
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    source = """
import os
for path in ("/usr", "/dev/null", "/"):
    print(path, os.statvfs(path).f_flag & (os.ST_RDONLY | os.ST_NOSUID))
"""
    assert outcome(source, True).output == b"/usr 3\n/dev/null 3\n/ 2\n"


def verdict(code: bytes, architecture: int, number: int, second_argument: int = 0) -> int:
    """What the kernel makes of a call: the four instructions that the filter is made of."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, 0, second_argument, 0, 0, 0, 0)
    instructions = [*struct.iter_unpack("<HBBI", code)]
    at = value = 0
    while True:
        operation, if_true, if_false, constant = instructions[at]
        at += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        else:
            is_true = {0x15: value == constant, 0x35: value >= constant}[operation]
            at += if_true if is_true else if_false


ALLOWED, ENDED, REFUSED = 0x7FFF0000, 0x80000000, 0x00050001
READ_KILL_SHMGET_FCNTL = {"x86_64": (0xC000003E, 0, 62, 29, 72), "aarch64": (0xC00000B7, 63, 129, 194, 25)}


@pytest.mark.parametrize("machine", READ_KILL_SHMGET_FCNTL)
def test_seccomp_filter_covers_both_architectures(machine: str) -> None:
    own, read, kill, shmget, fcntl = READ_KILL_SHMGET_FCNTL[machine]
    inside, outside = (seccomp_filter(machine, isolated=isolated) for isolated in (True, False))
    assert inside is not None
    assert outside is not None
    for code in (inside, outside):
        assert verdict(code, own, read) == ALLOWED
        assert verdict(code, own, shmget) == REFUSED
        assert verdict(code, own, fcntl, 1031) == REFUSED
        assert verdict(code, own, fcntl, 2) == ALLOWED
        assert verdict(code, own, read + 0x40000000) == REFUSED
        assert verdict(code, 0x40000003, read) == ENDED  # 32 bits, where numbers mean other calls
    assert (verdict(inside, own, kill), verdict(outside, own, kill)) == (ALLOWED, REFUSED)
    assert seccomp_filter("riscv64", isolated=True) is None
