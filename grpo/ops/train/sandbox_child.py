"""Run one Python program in the sandbox: `python -I -S sandbox_child.py SETTINGS`.

A file of its own that imports only the standard library, as it is started for every program. With namespaces, three
processes are above the program, so that none of its own can outlive them: this one, which measures the time; the one
that creates the namespaces; and the first one inside, whose end makes the kernel end all others inside.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

NEW_USER, NEW_NET, NEW_PID, NEW_MOUNTS, NEW_IPC, NEW_UTS = (
    0x10000000,
    0x40000000,
    0x20000000,
    0x00020000,
    0x08000000,
    0x04000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MS_RELATIME, ST_RELATIME = 1 << 21, 4096
KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048  # mount flags: nosuid, nodev, noexec, noatime, nodiratime
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY_NOSUID = 442, -100, 0x8000, 1 | 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
ANSWER_BYTES = 65536
NOBODY = 65534  # the program's user if this runs as root: no limit counts root's processes
SEEN = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
MOST_FILES = 4096  # in its root, including those of the root itself: each takes a kilobyte of kernel memory
CLEANUP_S = 5.0

libc = ctypes.CDLL(None, use_errno=True)


class Stopped(Exception):
    """SIGTERM: the reader of the output has seen enough."""


class Refused(OSError):
    """The kernel refuses a part of the sandbox."""


class Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def main(settings: dict[str, Any]) -> None:
    """Send one JSON object to the socket `status_fd`: `code`, or `late`, or `error` with the reason for having no
    sandbox."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    os.set_inheritable(settings["status_fd"], False)  # else the program could report its own end
    _die_with_parent()
    _check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    answer: dict[str, Any] = {}
    try:
        answer = _run(settings)
    except Stopped:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all()
    os.write(settings["status_fd"], json.dumps(answer).encode())


def _run(settings: dict[str, Any]) -> dict[str, Any]:
    reported, results = socket.socketpair(type=socket.SOCK_SEQPACKET)  # not a pipe: /proc/PID/fd could open it
    ready, say_ready = os.pipe()
    may_go, say_go = os.pipe()
    is_root = os.getuid() == 0
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            if settings["group"] is not None:
                _write(settings["group"], "0")  # this process, and with it all its children
            if settings["isolated"]:
                _isolated(settings, is_root, say_ready, may_go, results)
            _die_with_parent()
            _limit(settings)
            _start_program(settings, settings["folder"])
        except BaseException as error:  # noqa: BLE001  no parent can say more
            _send(results, _error(error))
        os._exit(1)
    if not settings["isolated"]:
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # only root may read its memory and files
    results.close()
    os.close(say_ready)
    if settings["isolated"]:
        if os.read(ready, 1) and is_root:
            try:
                with _asking_the_kernel():
                    _write_maps(pid, f"0 0 1\n{NOBODY} {NOBODY} 1")
            except Refused as error:
                return _error(error)
        os.write(say_go, b"g")
    if not select.select([os.pidfd_open(pid)], [], [], settings["wall_s"])[0]:
        return {"late": True}
    reported.setblocking(False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        said = reported.recv(ANSWER_BYTES)  # of two, the first is the program's own: it could not be started
    return json.loads(said) if said else {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def _isolated(settings: dict[str, Any], is_root: bool, say_ready: int, may_go: int, results: socket.socket) -> NoReturn:
    """Run without network, other processes and files, except Python's own (read only) and an empty folder in memory."""
    with open(os.path.join(settings["folder"], "program.py"), "rb") as file:
        source = file.read()
    user, group = os.getuid(), os.getgid()
    with _asking_the_kernel():
        _check(libc.unshare(NEW_USER | NEW_NET | NEW_PID | NEW_MOUNTS | NEW_IPC | NEW_UTS), "unshare")
        _die_with_parent()  # new credentials have switched it off
        if not is_root:
            _write_maps(os.getpid(), f"{user} {user} 1", f"{group} {group} 1")
    os.write(say_ready, b"r")
    os.read(may_go, 1)
    first = os.fork()
    if first:
        os._exit(1 if os.waitpid(first, 0)[1] else 0)
    _die_with_parent()
    with _asking_the_kernel():
        _make_root(settings, source)
    program = os.fork()
    if not program:
        os.setsid()
        if is_root:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        _limit(settings)
        _start_program(settings, "/work")
    while (ended := os.wait())[0] != program:
        pass
    _send(results, {"code": os.waitstatus_to_exitcode(ended[1])})
    os._exit(0)


def _make_root(settings: dict[str, Any], source: bytes) -> None:
    """Make a root of its own in memory, limited to `file_bytes`."""
    root = settings["folder"]
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount(
        "tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={settings['file_bytes']},nr_inodes={MOST_FILES}"
    )
    seen: list[str] = []
    for path in (*SEEN, settings["prefix"]):
        if not os.path.exists(path) or any(f"{path}/".startswith(f"{each}/") for each in seen):
            continue
        inside = root + path
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.makedirs(inside)
        else:
            open(inside, "w").close()
        _mount(path, inside, None, MS_BIND | MS_REC)
        _make_read_only(inside)
        seen.append(path)
    for name in ("work", "tmp"):
        os.makedirs(f"{root}/{name}", exist_ok=True)  # exists already if Python is below it
        os.chmod(f"{root}/{name}", 0o1777)
    with open(f"{root}/work/program.py", "wb") as file:
        file.write(source)
    os.chroot(root)
    os.chdir("/work")


def _make_read_only(path: str) -> None:
    """Remount read only, with all mounts below."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY_NOSUID, 0, 0, 0)
    where = ctypes.c_char_p(path.encode())
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, where, AT_RECURSIVE, attributes, 32) >= 0:
        return
    with open("/proc/self/mountinfo") as file:  # before Linux 5.12
        mounts = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in file]
    for mount in mounts:
        if f"{mount}/".startswith(f"{path}/"):
            flags = os.statvfs(mount).f_flag  # flags set by another namespace must stay
            kept = flags & KEPT_FLAGS | (MS_RELATIME if flags & ST_RELATIME else 0)
            _mount("none", mount, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def _limit(settings: dict[str, Any]) -> None:
    for name, value in (
        ("CPU", settings["cpu_s"]),
        ("AS", settings["memory_bytes"]),
        ("FSIZE", settings["file_bytes"]),
        ("NPROC", settings["processes"]),
        ("NOFILE", 64),
        ("CORE", 0),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (limit, limit))


def _start_program(settings: dict[str, Any], folder: str) -> NoReturn:
    python = settings["python"]
    os.chdir(folder)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    try:
        with _asking_the_kernel():
            _filter_calls(settings["filter"])
    except Refused:
        if settings["isolated"]:
            raise
    os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", "program.py"], {})


def _filter_calls(code: str | None) -> None:
    if code is None:
        raise OSError(errno.ENOSYS, f"no filter of system calls is known for {os.uname().machine}")
    instructions = bytes.fromhex(code)
    what = Filter(len(instructions) // 8, instructions)
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(what), 0, 0), "seccomp")


@contextlib.contextmanager
def _asking_the_kernel() -> Iterator[None]:
    """Turn a refusal of the kernel inside the block into `Refused`."""
    try:
        yield
    except OSError as error:
        raise Refused(*error.args) from error


def _error(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "is_refused": isinstance(error, Refused)}


def _send(keeper: socket.socket, what: dict[str, Any]) -> None:
    keeper.send(json.dumps(what).encode())


def _end_all() -> None:
    """Kill every process below this one: orphans become children of this one."""
    until = time.monotonic() + CLEANUP_S
    while time.monotonic() < until:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def _write_maps(pid: int, users: str, groups: str | None = None) -> None:
    if groups is not None:  # without root, group maps require setgroups to be denied
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", users)
    _write(f"/proc/{pid}/gid_map", groups or users)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if each is None else each.encode() for each in (source, target, kind)]
    _check(libc.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def _die_with_parent() -> None:
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
