"""Programs that a model wrote, run with limits. docs/recipes.md says what they are kept from, and what not."""

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
_GRACE_S = 10.0  # beyond `wall_s`, for the child that counts it to clean up
_TRIAL_S = 60.0  # a machine that starts a job is slow
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """Of one program."""

    wall_s: float = 10.0
    cpu_s: int = 8
    """Of each of its processes."""
    memory_bytes: int = 2**30
    """Address space of each of its processes; where there are control groups, all memory of them together, too."""
    processes: int = 8
    """And threads, all together. Without namespaces those of its user count, and root's are not counted."""
    file_bytes: int = 2**24
    """All files together; without namespaces, each file."""
    output_bytes: int = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended."""

    code: int | None
    """Its exit code, minus a signal's number; None where it was ended."""
    output: bytes
    """Standard output, up to `output_bytes`."""
    why: str = ""
    """Why it was ended: "late", "output", "memory" (of all its processes), or what the sandbox could not do."""
    is_refused: bool = False
    """Whether that was to get what a sandbox is made of from this machine."""


def run_program(
    source: str, stdin: bytes = b"", limits: ProgramLimits | None = None, *, isolated: bool = True
) -> Outcome:
    """Run a Python program with the standard library alone, no variables and a folder of its own; all of it ends here.

    Args:
        isolated: in namespaces: without network, other processes and files; and without the system calls of
            `system_calls`. Where that cannot be had `why` says so. Otherwise with limits, and what can be had.
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
    """What the one process that counts for it has said before it ended; empty where it was killed."""
    status.setblocking(False)
    try:
        answer = json.loads(status.recv(_READ_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _read(child: subprocess.Popen[bytes], limits: ProgramLimits) -> tuple[bytes, bool]:
    """Standard output, and whether it is whole; `child` and all below it have ended then."""
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
    """True: programs run in the sandbox. False where there is none, and GRPO_CODE_REWARD_UNISOLATED=1 lets limits do.

    Raises:
        ValueError: this machine gives no sandbox, and nobody said that limits will do.
        RuntimeError: a program could not be tried out for another reason, which may be over the next time.
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
