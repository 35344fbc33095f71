"""The kinds of other libraries' errors: by class, by number, and by text where there is no better. Ours carry theirs.

Imports none of these libraries: an error is told before torch is there.
"""

import errno
import re
from collections.abc import Iterator

from grpo.faults.failure import FailureKind, GrpoError

# OSErrors that say what the user has named: a path, or rights to it. Others are of disks and networks.
_OF_PATHS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_OF_PATHS_BY_NUMBER = (errno.ENOTEMPTY, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
_OF_THE_MACHINE = (TimeoutError, ConnectionError, InterruptedError, EOFError, MemoryError)

_ANY = re.compile("")
_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_ROOM_OF_VLLM = re.compile(
    r"^(Free memory on device|Available memory on node) .* is less than desired \w+ memory utilization"
    r"|^No available memory for the cache blocks|larger than the available KV cache memory",
    re.DOTALL,
)
_TROUBLE = re.compile(  # of devices, groups, disks and data-loader workers
    r"\b(cuda|nccl|cudnn\w*|cublas\w*|gloo|hip|rccl|xid)|timed out|timeout|connection (closed|reset|refused)"
    r"|broken pipe|no space left|input/output error|dataloader worker",
    re.IGNORECASE,
)
_OTHERS_CAUSE = re.compile(r"^(Engine core|WorkerProc) initialization failed|^Executor failed")

FOREIGN: tuple[tuple[re.Pattern[str], re.Pattern[str], FailureKind], ...] = (
    # Class (module and name, of any base), text, kind; the first that fits both.
    (re.compile(r"huggingface_hub\..*OfflineModeIsEnabled"), _ANY, FailureKind.USER),  # it is not on this machine
    (re.compile(r"torch\.OutOfMemoryError"), _ANY, FailureKind.MEMORY),
    (re.compile(r"torch\.AcceleratorError|builtins\.RuntimeError"), _MEMORY, FailureKind.MEMORY),
    (re.compile(r"builtins\.ValueError"), _ROOM_OF_VLLM, FailureKind.MEMORY),
    (re.compile(r"vllm\..*EngineDeadError"), _ANY, FailureKind.ENGINE),
    (re.compile(r"builtins\.Exception"), _OTHERS_CAUSE, FailureKind.ENGINE),  # vLLM's, of another process's error
    (re.compile(r"torch\..*Dist\w*Error|torch\.AcceleratorError"), _ANY, FailureKind.MACHINE),
    (re.compile(r"(httpx|httpcore)\.\w+"), _ANY, FailureKind.MACHINE),
    (re.compile(r"builtins\.RuntimeError|\w*\.?SafetensorError"), _TROUBLE, FailureKind.MACHINE),
)


def kind_of_foreign(error: BaseException) -> FailureKind | None:
    """The kind of an error that is not ours; None where nothing but the error itself speaks for one."""
    names = _names(error)
    if (told := _kind_of_answer(error)) is not None:
        return told
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
    if isinstance(error, (NotImplementedError, RecursionError)):  # RuntimeErrors of the code, whatever they say
        return []
    return [f"{each.__module__}.{each.__name__}" for each in type(error).__mro__]


def _kind_of_answer(error: BaseException) -> FailureKind | None:
    """By the hub's answer, if the error has one: whether it cannot now, or not to so many."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if not isinstance(status, int):
        return None
    return FailureKind.MACHINE if status in (408, 429) or status >= 500 else FailureKind.USER


def _kind_of_number(error: OSError) -> FailureKind:
    """Without a number it is transformers', for a typo and for a hub that is down. A hub that cannot be reached at all
    is more often a name that is not there than a network that is gone."""
    if error.errno is None:
        is_down = any(_kind_of_answer(cause) is FailureKind.MACHINE for cause in with_causes(error))
        return FailureKind.MACHINE if is_down else FailureKind.USER
    is_named = isinstance(error, _OF_PATHS) or error.errno in _OF_PATHS_BY_NUMBER
    return FailureKind.USER if is_named else FailureKind.MACHINE


def may_be_an_echo(error: BaseException) -> bool:
    """Whether `error` may follow from another rank's failure: from a lost peer, or from the launcher's SIGTERM."""
    foreign = [
        seen for seen in with_causes(error) if isinstance(seen, RuntimeError) and not isinstance(seen, GrpoError)
    ]
    return any(kind_of_foreign(seen) is FailureKind.MACHINE for seen in foreign)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on; each once, for `raise error from error` makes a circle."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
