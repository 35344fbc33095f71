"""Sandbox for programs written by a model. docs/recipes.md lists its guarantees and limits."""

import contextlib
import functools
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo.ops.train.sandbox_group import entrance, is_full, own_place, program_group
from grpo.ops.train.system_calls import seccomp_filter

UNISOLATED = "GRPO_CODE_REWARD_UNISOLATED"
_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 10.0  # beyond `wall_s`, for the child that measures it to clean up
_TRIAL_S = 60.0  # a machine that starts a job is slow
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """Limits of one program."""

    wall_s: float = 10.0
    cpu_s: int = 8
    """CPU seconds of each of its processes."""
    memory_bytes: int = 2**30
    """Address space of each of its processes; with control groups, also the memory of all together."""
    processes: int = 8
    """Processes and threads together. Without namespaces all of the user's count; root's do not count."""
    file_bytes: int = 2**24
    """Size of all files together; without namespaces, of each file."""
    output_bytes: int = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a program."""

    code: int | None
    """Exit code, or minus the signal's number; None if the sandbox ended it."""
    output: bytes
    """Standard output, up to `output_bytes`."""
    why: str = ""
    """Reason for ending it: "late", "output", "memory" (of all its processes), or a failure of the sandbox."""
    is_refused: bool = False
    """True if this machine refused a part of the sandbox."""


def run_program(
    source: str, stdin: bytes = b"", limits: ProgramLimits | None = None, *, isolated: bool = True
) -> Outcome:
    """Run a Python program with only the standard library, no environment variables and a folder of its own. All of its
    processes have ended on return.

    Args:
        isolated: run in namespaces, without network, other processes and files, and without the system calls of
            `system_calls`; `why` says so if that is impossible. False: with limits, and everything else available.
    """
    limits = ProgramLimits() if limits is None else limits
    with contextlib.ExitStack() as stack:
        try:
            place = own_place()
            group = None if place is None else stack.enter_context(program_group(place, limits.memory_bytes))
        except OSError as error:
            return Outcome(code=None, output=b"", why=f"control group: {error}")
        ended = _run(source, stdin, limits, group, isolated=isolated)
        return replace(ended, code=None, why="memory") if is_full(group) else ended


def _run(source: str, stdin: bytes, limits: ProgramLimits, group: Path | None, *, isolated: bool) -> Outcome:
    folder = tempfile.mkdtemp(prefix="grpo-sandbox-")
    status, said = socket.socketpair(type=socket.SOCK_SEQPACKET)
    try:
        with status:
            given = Path(folder, "stdin")
            given.write_bytes(stdin)
            with said, given.open("rb") as stdin_file:
                given.unlink()
                Path(folder, "program.py").write_text(source, errors="surrogatepass")
                code = seccomp_filter(os.uname().machine, isolated=isolated)
                own = {"folder": folder, "isolated": isolated, "status_fd": said.fileno()}
                own |= {"filter": None if code is None else code.hex()}
                own |= {"group": None if group is None else str(entrance(group))}
                own |= {"python": os.path.realpath(sys.executable), "prefix": os.path.realpath(sys.base_prefix)}
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_CHILD), json.dumps(asdict(limits) | own)],
                    stdin=stdin_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                    start_new_session=True,
                    pass_fds=[said.fileno()],
                )
            output, is_whole = _read(child, limits)
            answer = _answer(status)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not is_whole:
        return Outcome(code=None, output=output, why="output")
    if "code" in answer:
        return Outcome(code=answer["code"], output=output)
    why = "late" if "late" in answer else answer.get("error", "it was killed")
    return Outcome(code=None, output=output, why=why, is_refused=answer.get("is_refused", False))


def _answer(status: socket.socket) -> dict[str, Any]:
    """Read the last message of the sandbox's child; empty if it was killed."""
    status.setblocking(False)
    try:
        answer = json.loads(status.recv(_READ_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _read(child: subprocess.Popen[bytes], limits: ProgramLimits) -> tuple[bytes, bool]:
    """Return standard output, and True if it is complete; `child` and all its descendants have ended by then."""
    assert child.stdout is not None
    output, until = bytearray(), time.monotonic() + limits.wall_s + _GRACE_S
    with child.stdout, selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while len(output) <= limits.output_bytes:
            if not selector.select(until - time.monotonic()):
                break
            part = os.read(child.stdout.fileno(), _READ_BYTES)
            if not part:
                break
            output += part
        is_whole = len(output) <= limits.output_bytes
        if not is_whole:
            child.terminate()
        try:
            child.wait(max(0.1, until - time.monotonic()) if is_whole else _GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return bytes(output[: limits.output_bytes]), is_whole


@functools.cache
def must_isolate() -> bool:
    """True if programs run in the sandbox; False without one if GRPO_CODE_REWARD_UNISOLATED=1 accepts limits only.

    Raises:
        ValueError: this machine has no sandbox, and limits only are not accepted.
        RuntimeError: the trial failed for another, possibly temporary reason.
    """
    said = os.environ.get(UNISOLATED, "0")
    if said not in ("0", "1"):
        raise ValueError(f"{UNISOLATED} is {said!r}: write 1 to run programs without a sandbox, or unset it")
    tried = run_program("print(6 * 7)", b"", ProgramLimits(wall_s=_TRIAL_S))
    if tried.output == b"42\n":
        return True
    why = tried.why or f"exit code {tried.code}"
    if not tried.is_refused:
        raise RuntimeError(
            f"the sandbox for programs of the model failed on `print(6 * 7)` ({why}): is {sys.executable}, with its "
            f"libraries, below /usr, /lib or {sys.base_prefix}, and has the machine memory and processors left?"
        )
    if said == "0":
        raise ValueError(
            f"this machine gives no sandbox for programs of the model ({why}) [GRPO-630]: allow unprivileged user "
            "namespaces (sysctl user.max_user_namespaces; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in "
            "a container its seccomp profile), or score programs elsewhere by a reward function of your own. On nodes "
            f"that hold nothing else, {UNISOLATED}=1 runs them with limits alone: with this user's files, environment "
            "and network in reach"
        )
    warnings.warn(
        f"programs of the model run with limits alone, with this user's files, environment and network in reach: this "
        f"machine gives no sandbox ({why}), and {UNISOLATED}=1",
        stacklevel=2,
    )
    return False
