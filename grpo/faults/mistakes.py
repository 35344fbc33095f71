"""The kind of a failure, its record, and whether the job has got past its first step."""

import contextlib
import sysconfig
import threading
import traceback
from pathlib import Path

from grpo.faults.decisions import Answer, answer_to
from grpo.faults.failure import FailureKind, FailureRecord, GrpoError, JobFailed
from grpo.faults.foreign import kind_of_foreign
from grpo.faults.memory_advice import explain

_past_first_step = threading.Event()

_KIND, _TEXT = "_grpo_kind", "_grpo_text"  # on an error that is not ours
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def note_first_step() -> None:
    """This process's job has made an optimizer step, or goes on behind one."""
    _past_first_step.set()


def is_past_first_step() -> bool:
    return _past_first_step.is_set()


def kind_of(error: BaseException) -> FailureKind:
    """An error's own kind, or that of a library's; any other exception is what the user's code or settings led to.

    A device whose memory others hold is the machine's; figures and advice become notes of the error.
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
    """Whether another start would meet `error` again, for what this process knows."""
    return answer_to(kind_of(error), is_behind_first_step=is_past_first_step()) is Answer.END


def is_users(error: BaseException) -> bool:
    """Whether `error` is of what the user wrote."""
    return kind_of(error) is FailureKind.USER


def is_for_user(kind: str | None) -> bool:
    """Whether a few lines say what to change, and no traceback says more: settings, data, memory."""
    return kind in (FailureKind.USER, FailureKind.MEMORY)


def text_of(error: BaseException) -> str:
    """For records: its class, its text, and notes such as a device's figures."""
    kind_of(error)
    text = f"{type(error).__name__}: {getattr(error, _TEXT, error)}"
    return "\n".join([text, *getattr(error, "__notes__", ())])


def record_of(
    cause: BaseException | str, *, node: int, rank: int, host: str, phase: str, kind: FailureKind = FailureKind.MACHINE
) -> FailureRecord:
    """A rank's failure on record; one that has a record keeps it.

    Args:
        kind: of a cause that is a text.
    """
    if isinstance(cause, JobFailed):
        return cause.record
    text = cause
    if isinstance(cause, BaseException):
        text, kind = text_of(cause), kind_of(cause)
    return FailureRecord(node=node, rank=rank, host=host, phase=phase, cause=str(text), kind=kind)


def users_frame(error: BaseException) -> str | None:
    """`file:line, in function: code` of the innermost frame that is neither a library's nor this project's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_library = frame.filename.startswith((*_LIBRARIES, "<")) or _PACKAGE in path.resolve().parents
        if not is_library:
            return shown_frame(frame)
    return None


def shown_frame(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
