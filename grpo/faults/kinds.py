"""The kind of an error: its own, a library's (by class, errno and text), or the user's; and its failure record.

Imports none of these libraries: errors are classified before torch is loaded.
"""

import contextlib
import errno
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from grpo.faults.device_memory import explain
from grpo.faults.failure import Decision, FailureKind, FailureRecord, GrpoError, JobFailed, answer_to, with_causes

_steps_done = 0

_KIND, _TEXT = "_grpo_kind", "_grpo_text"  # set on errors of other libraries
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def note_steps(done: int) -> None:
    """Note how many optimizer steps this process's job has finished, those before a resume included."""
    global _steps_done
    _steps_done = done


def steps_done() -> int:
    return _steps_done


def kind_of(error: BaseException) -> FailureKind:
    """Return an error's kind: its own, or a library's by class and text. Any other exception is the user's.

    A device filled by other processes is MACHINE; figures and advice are added to the error as notes.
    """
    if isinstance(error, GrpoError):
        return error.kind
    kind = getattr(error, _KIND, None)
    if kind is None:
        kind = _find_kind(error)
        with contextlib.suppress(AttributeError, TypeError):  # an exception may have slots
            setattr(error, _KIND, kind)
    return kind


def _find_kind(error: BaseException) -> FailureKind:
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return FailureKind.STOP
    if isinstance(error, SystemExit):
        return FailureKind.MACHINE if error.code in (None, 0) else FailureKind.USER
    kind = kind_of_foreign(error) or FailureKind.USER
    if kind is FailureKind.MEMORY:
        found = explain(error)
        kind = FailureKind.MACHINE if found.is_others else kind
        setattr(error, _TEXT, found.text)
        for line in found.lines:
            error.add_note(line)
    return kind


def ends_job(error: BaseException) -> bool:
    """True if a restart would meet `error` again, as far as this process knows."""
    return answer_to(kind_of(error), is_behind_first_step=_steps_done > 0) is Decision.END


def is_users(error: BaseException) -> bool:
    """True if the user's code or settings caused `error`."""
    return kind_of(error) is FailureKind.USER


def text_of(error: BaseException) -> str:
    """Text for records: class, message, and notes such as a device's figures."""
    kind_of(error)
    text = f"{type(error).__name__}: {getattr(error, _TEXT, error)}"
    return "\n".join([text, *getattr(error, "__notes__", ())])


def record_of(
    cause: BaseException | str, *, node: int, rank: int, host: str, phase: str, kind: FailureKind = FailureKind.MACHINE
) -> FailureRecord:
    """Make a failure record for a rank; a cause with a record keeps it.

    Args:
        kind: of a cause given as text.
    """
    if isinstance(cause, JobFailed):
        return cause.record
    text = cause
    if isinstance(cause, BaseException):
        text, kind = text_of(cause), kind_of(cause)
    return FailureRecord(node=node, rank=rank, host=host, phase=phase, cause=str(text), kind=kind)


def users_frame(error: BaseException) -> str | None:
    """Return `file:line, in function: code` of the innermost frame outside libraries and this project; None without
    one."""
    return next((shown_frame(frame) for frame, is_ours in _frames(error) if not is_ours), None)


def is_raised_by_users_code(error: BaseException) -> bool:
    """True if users' code, or a library under it, raised `error`: no frame of this project is further in."""
    return not next((is_ours for _, is_ours in _frames(error)), True)


def _frames(error: BaseException) -> Iterator[tuple[traceback.FrameSummary, bool]]:
    """Yield the frames outside libraries, the innermost first; True for those of this project."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_ours = _PACKAGE in Path(frame.filename).resolve().parents
        if is_ours or not frame.filename.startswith((*_LIBRARIES, "<")):
            yield frame, is_ours


def shown_frame(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"


# OSErrors about a path or permission the user named. Others are of disks and networks.
_OF_PATHS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_OF_PATHS_BY_NUMBER = (errno.ENOTEMPTY, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_OF_THE_MACHINE = (TimeoutError, ConnectionError, InterruptedError, EOFError, MemoryError)

_ANY = re.compile("")
_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_SPACE_OF_VLLM = re.compile(
    r"^(Free memory on device|Available memory on node) .* is less than desired \w+ memory utilization"
    r"|^No available memory for the cache blocks|larger than the available KV cache memory",
    re.DOTALL,
)
_TROUBLE = re.compile(  # devices, groups, disks and data-loader workers
    r"\b(cuda|nccl|cudnn\w*|cublas\w*|gloo|hip|rccl|xid)|timed out|timeout|connection (closed|reset|refused)"
    r"|broken pipe|no space left|input/output error|dataloader worker",
    re.IGNORECASE,
)
_OTHERS_CAUSE = re.compile(r"^(Engine core|WorkerProc) initialization failed|^Executor failed")

FOREIGN: tuple[tuple[re.Pattern[str], re.Pattern[str], FailureKind], ...] = (
    # Class (module and name, of any base), text, kind; the first row that matches both.
    (re.compile(r"huggingface_hub\..*OfflineModeIsEnabled"), _ANY, FailureKind.USER),  # not on this machine
    (re.compile(r"torch\.OutOfMemoryError"), _ANY, FailureKind.MEMORY),
    (re.compile(r"torch\.AcceleratorError|builtins\.RuntimeError"), _MEMORY, FailureKind.MEMORY),
    (re.compile(r"builtins\.ValueError"), _SPACE_OF_VLLM, FailureKind.MEMORY),
    (re.compile(r"vllm\..*EngineDeadError"), _ANY, FailureKind.ENGINE),
    # raised by vLLM for another process's error
    (re.compile(r"builtins\.Exception"), _OTHERS_CAUSE, FailureKind.ENGINE),
    (re.compile(r"torch\..*Dist\w*Error|torch\.AcceleratorError"), _ANY, FailureKind.MACHINE),
    (re.compile(r"(httpx|httpcore)\.\w+"), _ANY, FailureKind.MACHINE),
    (re.compile(r"builtins\.RuntimeError|\w*\.?SafetensorError"), _TROUBLE, FailureKind.MACHINE),
)


def kind_of_foreign(error: BaseException) -> FailureKind | None:
    """Kind of another library's error; None if neither class nor text decides it."""
    names = _names(error)
    if (reported := _kind_of_answer(error)) is not None:
        return reported
    for of_class, of_text, kind in FOREIGN:
        if any(map(of_class.fullmatch, names)) and of_text.search(str(error)):
            return kind
    if isinstance(error, _OF_THE_MACHINE):
        return FailureKind.MACHINE
    if isinstance(error, OSError):
        return _kind_of_number(error)
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return error.__cause__.kind if isinstance(error.__cause__, GrpoError) else kind_of_foreign(error.__cause__)
    return None


def _names(error: BaseException) -> list[str]:
    if isinstance(error, (NotImplementedError, RecursionError)):  # RuntimeErrors of the code, whatever their text
        return []
    return [f"{each.__module__}.{each.__name__}" for each in type(error).__mro__]


def _kind_of_answer(error: BaseException) -> FailureKind | None:
    """Kind by the HTTP status of the Hub's answer, if there is one: overloaded or down is MACHINE, others USER."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if not isinstance(status, int):
        return None
    return FailureKind.MACHINE if status in (408, 429) or status >= 500 else FailureKind.USER


def _kind_of_number(error: OSError) -> FailureKind:
    """Kind of an OSError by its errno. Without errno it is transformers', for a typo or a Hub that is down. An
    unreachable Hub more often means a wrong name than a broken network."""
    if error.errno is None:
        is_down = any(_kind_of_answer(cause) is FailureKind.MACHINE for cause in with_causes(error))
        return FailureKind.MACHINE if is_down else FailureKind.USER
    is_named = isinstance(error, _OF_PATHS) or error.errno in _OF_PATHS_BY_NUMBER
    return FailureKind.USER if is_named else FailureKind.MACHINE


def may_be_an_echo(error: BaseException) -> bool:
    """True if `error` may follow from another rank's failure: a lost peer, or the launcher's SIGTERM."""
    foreign = [
        seen for seen in with_causes(error) if isinstance(seen, RuntimeError) and not isinstance(seen, GrpoError)
    ]
    return any(kind_of_foreign(seen) is FailureKind.MACHINE for seen in foreign)
