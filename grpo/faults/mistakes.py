"""What is the user's mistake, which the next start would meet again, and what the machine's, which may heal.

Imports nothing heavy: a mistake is told before torch is there.
"""

import difflib
import errno
import re
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo.faults.failure import FailureRecord, GenerationDropped, JobFailed

_past_first_step = threading.Event()

# Of an OSError that says what the user has named: a path, or rights to it. Others are of disks and networks.
_OF_PATHS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}
_USERS_OWN = "OfflineModeIsEnabled"  # the hub's, a ConnectionError: what is named is not on this machine
_OF_THE_MACHINE = (TimeoutError, ConnectionError, InterruptedError, EOFError, MemoryError, GenerationDropped)
# By module and name, for what is not imported here: torch's own errors of groups and stores, and the hub's transport.
_FOREIGN = re.compile(r"torch\..*Dist\w*Error|torch\.OutOfMemoryError|torch\.AcceleratorError|httpx\.\w+|httpcore\.\w+")
_DEVICES = re.compile(r"\b(cuda|nccl|cudnn\w*|cublas\w*|gloo|hip|rccl|xid)|out of memory", re.IGNORECASE)
_EVENTS = re.compile(
    r"timed out|timeout|is not ready after|did not (answer|come|open)|has not read|within \d+ s|killed|by signal"
    r"|died|connection|\bpeer\b|broken pipe|store is gone|no space left|input/output error|dataloader worker",
    re.IGNORECASE,
)
# What plain RuntimeErrors say when a peer is lost, or when the launcher's SIGTERM reached a data-loader worker first.
_ECHOES = ("gloo", "nccl", "connection", "peer", "timed out", "dataloader worker")
_OF_A_GROUP = re.compile(r"torch\..*Dist\w*Error")
_ERROR_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LOG = "; the last lines of "  # of an engine, which an error about it ends with


def note_first_step() -> None:
    """This process's job has made an optimizer step, or goes on behind one: from now on failures may heal."""
    _past_first_step.set()


def is_before_first_step() -> bool:
    return not _past_first_step.is_set()


def is_mistake(error: BaseException, *, before_first_step: bool) -> bool:
    """Whether `error` is what the user wrote, so that the next start would meet it again.

    In doubt a failure before the first optimizer step of a job is the user's, unless the machine caused it: a killed or
    silent process, a lost store or connection, a deadline, CUDA, NCCL, a disk. Behind the first step none is.

    Args:
        before_first_step: of the job; a run that has resumed from a checkpoint is past it.
    """
    if isinstance(error, JobFailed):
        return not error.record.can_heal
    if not before_first_step or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return False
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return not _is_of_the_machine(error)


def record_of(cause: BaseException | str, *, node: int, rank: int, host: str, phase: str) -> FailureRecord:
    """A rank's failure on record; one that has a record keeps it."""
    if isinstance(cause, JobFailed):
        return cause.record
    text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    mistake = isinstance(cause, BaseException) and is_mistake(cause, before_first_step=is_before_first_step())
    return FailureRecord(node=node, rank=rank, host=host, phase=phase, cause=text, can_heal=not mistake)


def _is_of_the_machine(error: BaseException) -> bool:
    if isinstance(error, _OF_THE_MACHINE):
        return type(error).__name__ != _USERS_OWN
    if _hub_status(error) is not None:
        return _is_hub_down(error)
    if isinstance(error, OSError):
        if error.errno is None:  # transformers raises it so for a typo, and for a hub that is down
            return any(_is_hub_down(cause) for cause in with_causes(error))
        return error.errno not in _OF_PATHS
    if any(_FOREIGN.fullmatch(f"{kind.__module__}.{kind.__name__}") for kind in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, RecursionError)):
        return _tells_of_the_machine(str(error)) or (
            error.__cause__ is not None and _is_of_the_machine(error.__cause__)
        )
    return False


def _is_hub_down(error: BaseException) -> bool:
    """Whether the hub has answered that it cannot now, or not to so many. One that cannot be reached at all is, before
    the first step, more often a name that is not there than a network that is gone."""
    status = _hub_status(error)
    return status is not None and (status in (408, 429) or status >= 500)


def _hub_status(error: BaseException) -> int | None:
    """Of the hub's answer, if it is one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _tells_of_the_machine(text: str) -> bool:
    """By the words of a RuntimeError; of the log behind it those lines count that are errors, for devices alone."""
    head, _, log = text.partition(_LOG)
    if _DEVICES.search(head) or _EVENTS.search(head):
        return True
    return any(_DEVICES.search(line) for line in log.splitlines() if _ERROR_LINE.search(line))


def may_be_an_echo(error: BaseException) -> bool:
    """Whether `error` may be the consequence of another rank's failure."""
    for seen in with_causes(error):
        if any(_OF_A_GROUP.fullmatch(f"{kind.__module__}.{kind.__name__}") for kind in type(seen).__mro__):
            return True
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(word in text for word in _ECHOES):
            return True
    return False


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on; each once, for `raise error from error` makes a circle."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)', for the one of the known names that is most like it; '' without one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


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
