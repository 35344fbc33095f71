"""Report of a user's mistake: one message from one rank, a record for torchrun and one for the scheduler, no
traceback."""

import ast
import contextlib
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from grpo.faults.failure import FailureKind, JobFailed
from grpo.faults.kinds import ends_job, is_raised_by_users_code, kind_of, steps_done, text_of, users_frame
from grpo.place.files import flag_of
from grpo.place.launch import read_launch
from grpo.place.log import FILE_ONLY, start_log
from grpo.place.spelling import did_you_mean
from grpo.record.durable import write_atomically
from grpo.record.files import note_failure
from grpo.record.folder import record_early_failure

_log = logging.getLogger(__name__)

MAX_LINES = 6
TRACEBACK_VARIABLE = "GRPO_TRACEBACK"
RANK_ZERO_S = 5.0  # other ranks let rank 0 report first: after their exit the launcher ends rank 0

UNUSED = re.compile(  # transformers' and TRL's words, the latter for keys of --config
    r"(?:Some specified arguments are not used by the HfArgumentParser|Unknown arguments from config (file)): (\[.*?\])"
)
_IS_MISTAKE = "_grpo_is_mistake"  # set on errors that are reported


@dataclass(slots=True)
class Reporter:
    """State of `reporting_mistakes`."""

    output_dir: Path | None
    """Folder for `run_state.json`, once known; None: only the trainer writes it."""


@contextlib.contextmanager
def reporting_mistakes(output_dir: "str | Path | None" = None) -> Iterator[Reporter]:
    """Wrap a rank's whole program: report its failure once, and re-raise it.

    For a mistake (of the user, or out of device memory) that ends the job, rank 0 writes at most `MAX_LINES` lines to
    stderr. After the first step a rank does so for an error of the user's own code, such as a reward function. The
    interpreter then exits with code 1 and without a traceback, unless GRPO_TRACEBACK=1; the log has it. On every rank
    torchelastic's error file gets the same message; torchrun shows it in its summary. A rank that ends because another
    one has failed writes a line; its traceback is in its log. Other errors keep their traceback, and are recorded for
    torchrun as by its `@record`. Errors that end the job are written into `run_state.json`. If nested, the innermost
    one reports.
    """
    reporter = Reporter(None if output_dir is None else Path(output_dir))
    _silence_what_is_reported()
    start_log()
    try:
        yield reporter
    except BaseException as error:
        if not hasattr(error, _IS_MISTAKE):
            is_for_user = kind_of(error) in (FailureKind.USER, FailureKind.MEMORY)
            setattr(error, _IS_MISTAKE, is_for_user and (ends_job(error) or is_raised_by_users_code(error)))
            _report(error, reporter.output_dir)
        raise


def message_of(error: BaseException) -> str:
    """Return a mistake in at most `MAX_LINES` lines: value, fix, and the place in the user's own code."""
    if isinstance(error, JobFailed):
        own, record = error.__cause__, error.record
        if own is None or text_of(own) != record.cause:
            place = f" (rank {record.rank} on {record.host})" if record.rank else ""
            return _cut(record.cause.removeprefix(f"{ValueError.__name__}: ") + place, MAX_LINES)
        return message_of(own)  # says the same, of this rank
    if isinstance(error, SyntaxError):
        return _cut(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}", MAX_LINES)
    text = text_of(error)
    if type(error) is ValueError and str(error):
        text = text.removeprefix(f"{ValueError.__name__}: ")
    if (unused := UNUSED.match(text)) is not None:
        text = _with_near_flags(unused)
    where = users_frame(error)
    return _cut(text, MAX_LINES - (where is not None)) + (f"\n  in {where}" if where is not None else "")


def _with_near_flags(unused: re.Match[str]) -> str:
    """Replace a complaint about unknown flags or keys by one with their file and suggestions."""
    from grpo.config import GRPOConfig

    is_key, words = unused.groups()
    dashes, where = ("", f" in {flag_of(sys.argv, 'config')}") if is_key else ("--", "")
    known = [dashes + name for name in GRPOConfig.__dataclass_fields__]
    names = [dashes + word.removeprefix("--") for word in ast.literal_eval(words) if word.startswith("--")]
    return f"unknown options{where}: {', '.join(name + did_you_mean(name.split('=')[0], known) for name in names)}"


def _cut(text: str, lines: int) -> str:
    kept = [line.rstrip() for line in text.strip().splitlines() if line.strip()]
    return "\n".join(kept if len(kept) <= lines else [*kept[: lines - 1], f"… ({len(kept) - lines + 1} more lines)"])


def _report(error: BaseException, output_dir: Path | None) -> None:
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)) or (isinstance(error, SystemExit) and not error.code):
        return
    rank, local_rank = _place()
    is_mistake = getattr(error, _IS_MISTAKE)
    message = text_of(error)
    if is_mistake:
        message = message_of(error) if not isinstance(error, SystemExit) else f"the script ended itself: {error}"
        # For an exit argparse, or the interpreter, has printed the reason.
        if not isinstance(error, SystemExit) and (rank == 0 or not ends_job(error)):
            sys.stderr.write(f"[grpo] {message}\n")
            _log.error("%s", message, exc_info=error, extra=FILE_ONLY)
    elif _is_elsewhere(error):
        sys.stderr.write(f"[grpo] rank {rank} ends: {error}\n")
        _log.error("ends in:", exc_info=error, extra=FILE_ONLY)
    note_failure(os.environ, message, kind_of(error), step=steps_done())
    if rank == 0 and output_dir is not None and ends_job(error):
        record_early_failure(output_dir, os.environ, text_of(error), kind_of(error))
    is_short = (is_mistake or _is_elsewhere(error)) and not _shows_tracebacks()
    _write_error_file(message, message if is_short else traceback.format_exc())
    if is_mistake:
        _await_rank_zero(local_rank)


def _shows_tracebacks() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")


def _place() -> tuple[int, int]:
    try:
        launch = read_launch(os.environ)
    except ValueError:  # may be the mistake itself
        return 0, 0
    return launch.rank, launch.local_rank


def _is_elsewhere(error: BaseException) -> bool:
    """True if another rank has failed, and this one only learnt of it."""
    return isinstance(error, JobFailed) and error.record.rank != _place()[0]


def _error_file() -> Path | None:
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file) if file else None


def _write_error_file(message: str, callstack: str) -> None:
    """Write torch's error file as `ErrorHandler.record_exception` does, without torch; torchrun shows
    `py_callstack`."""
    file = _error_file()
    if file is None:
        return
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # must not hide the error
        write_atomically(file, json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _await_rank_zero(local_rank: int) -> None:
    """Wait for the report of this node's first rank: torchrun keeps the files of a node's ranks next to each other."""
    file = _error_file()
    if file is None or not local_rank:
        return
    deadline = time.monotonic() + RANK_ZERO_S
    while not (file.parent.parent / "0" / file.name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


class _Hook:
    """An excepthook: silent on reported errors and those of other ranks, unless tracebacks are requested.

    The failure watch installs its own before it, and calls this one.
    """

    def __init__(self) -> None:
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _shows_tracebacks() or not (getattr(error, _IS_MISTAKE, False) or _is_elsewhere(error)):
            self._before(kind, error, trace)


def _silence_what_is_reported() -> None:
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook()
