"""Programs that a model wrote, run with limits. docs/recipes.md says what they are kept from, and what not."""

import functools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 10.0  # beyond `wall_s`, for the child that counts it to clean up
_TRIAL_S = 60.0  # a machine that starts a job is slow
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one program."""

    wall_s: float = 10.0
    cpu_s: int = 8
    """Of each of its processes."""
    memory_bytes: int = 2**30
    """Address space of each of its processes."""
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
    """Why it was ended: "late", "output", or what the sandbox could not do."""
    has_no_namespaces: bool = False
    """Whether that was to get namespaces from this machine."""


def run_program(source: str, stdin: bytes = b"", limits: Limits | None = None, *, isolated: bool = True) -> Outcome:
    """Run a Python program with the standard library alone, no variables and a folder of its own; all of it ends here.

    Args:
        isolated: in namespaces: without network, other processes and files. Where none can be had `why` says so.
    """
    limits = Limits() if limits is None else limits
    folder = tempfile.mkdtemp(prefix="grpo-sandbox-")
    status, said = os.pipe()
    try:
        with open(status) as answers:
            with open(said, "w"), tempfile.TemporaryFile() as stdin_file:
                Path(folder, "program.py").write_text(source, errors="surrogatepass")
                stdin_file.write(stdin)
                stdin_file.seek(0)
                own = {"folder": folder, "isolated": isolated, "status_fd": said}
                own |= {"python": os.path.realpath(sys.executable), "prefix": os.path.realpath(sys.base_prefix)}
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_CHILD), json.dumps(asdict(limits) | own)],
                    stdin=stdin_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                    start_new_session=True,
                    pass_fds=[said],
                )
            output, is_whole = _read(child, limits)
            answer = json.loads(answers.read() or "{}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not is_whole:
        return Outcome(code=None, output=output, why="output")
    if "code" in answer:
        return Outcome(code=answer["code"], output=output)
    why = "late" if "late" in answer else answer.get("error", "it was killed")
    return Outcome(code=None, output=output, why=why, has_no_namespaces=answer.get("no_namespaces", False))


def _read(child: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, bool]:
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
def can_isolate() -> bool:
    """Whether this machine gives namespaces; warns once where it does not.

    Raises:
        RuntimeError: a program could not be tried out for another reason, which may be over the next time.
    """
    tried = run_program("print(6 * 7)", b"", Limits(wall_s=_TRIAL_S))
    if tried.output == b"42\n":
        return True
    why = tried.why or f"exit code {tried.code}"
    if not tried.has_no_namespaces:
        raise RuntimeError(
            f"the sandbox for programs of the model failed on `print(6 * 7)` ({why}): is {sys.executable}, with its "
            f"libraries, below /usr, /lib or {sys.base_prefix}, and has the machine memory and processors left?"
        )
    warnings.warn(
        f"programs of the model run with limits alone, with this user's files and network in reach, because this "
        f"machine gives no namespaces ({why}): allow unprivileged user namespaces, or give the job nodes that hold "
        "nothing else",
        stacklevel=2,
    )
    return False
