"""This node's launcher, run in this process: accelerate's or torchrun's own code, its signals and its logs.

Running in this process allows dropping torchrun's summary of a failure (45 lines at two ranks) if the ranks have
already explained it.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from grpo.place.launch import LINE_VARIABLE

# torchrun handles the signals it forwards to its ranks; SIGINT and SIGUSR1 are handled here.
PASSED_ON = "SIGTERM,SIGHUP,SIGQUIT"
# The nodes have just met. Until all launchers are there no signal is handled: the store wait is in C++ (2.13).
RENDEZVOUS = "timeout=120"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """End of this node's launcher."""

    has_succeeded: bool
    rank: int | None = None
    """First failed rank on this node."""
    is_interrupted: bool = False
    """True if a person ended it, by SIGINT."""
    is_terminated: bool = False
    """True if a SIGTERM ended it."""


def run_launcher(
    line: Sequence[str],
    ask_to_stop: Callable[[], bool],
    *,
    is_reported: Callable[[], bool] = lambda: False,
    is_asked_already: bool = False,
    accelerates: Sequence[str] = (),
) -> Ending:
    """Run `line` (accelerate's or torchrun's) to its end. From the main thread.

    Args:
        accelerates: accelerate's line, replaced by torchrun's: ranks read its file's settings there.
        ask_to_stop: called on SIGINT and SIGUSR1: asks the ranks to checkpoint and end; False if no trainer would read
            it.
        is_reported: returns True if the ranks have explained the failure themselves.
        is_asked_already: a SIGUSR1 came before: it is passed on once a trainer can read it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[LINE_VARIABLE] = json.dumps({"pid": os.getpid(), "argv": list(accelerates or line)})
    with _signals(ask_to_stop, is_asked_already), _held_back() as noise:
        try:
            _launch(line)
            noise[:] = [record for record in noise if not _is_farewell(record)]
            return Ending(has_succeeded=True)
        except ChildFailedError as error:
            if is_reported():
                noise.clear()
            else:
                print(error, file=sys.stderr, flush=True)
            return Ending(has_succeeded=False, rank=error.get_first_failure()[0])
        except SignalException as error:
            print(f"[grpo] ended by {error.sigval.name}", file=sys.stderr, flush=True)
            interrupted = error.sigval == signal.SIGINT
            return Ending(has_succeeded=False, is_interrupted=interrupted, is_terminated=not interrupted)
        except Exception as error:  # noqa: BLE001  the edge of the launcher's code: a lost node, a port in use
            why = (str(error).strip().splitlines() or [""])[0]
            print(f"[grpo] the launcher failed: {type(error).__name__}: {why}", file=sys.stderr, flush=True)
            return Ending(has_succeeded=False)


def _launch(line: Sequence[str]) -> None:
    launcher, *words = line
    if launcher == "torchrun":
        from torch.distributed import run

        arguments = run.parse_args(words)
        arguments.signals_to_handle = PASSED_ON
        arguments.rdzv_conf = RENDEZVOUS
        run.run(arguments)
        return
    from accelerate.commands.launch import launch_command, launch_command_parser

    arguments = launch_command_parser().parse_args(words[1:])
    # accelerate passes variables named like torchrun's options on to it (1.15).
    arguments.signals_to_handle, arguments.rdzv_conf = PASSED_ON, RENDEZVOUS
    launch_command(arguments)


def _is_farewell(record: logging.LogRecord) -> bool:
    """True for torchrun's harmless warning at the exit barrier: the first node's launcher, which has the store, may be
    gone by then (torch 2.13)."""
    return record.getMessage().startswith("Error waiting on exit barrier")


@contextmanager
def _signals(ask_to_stop: Callable[[], bool], is_asked_already: bool) -> Iterator[None]:
    """Handle signals in a `with` block: the first SIGINT or SIGUSR1 asks the ranks to stop; a second SIGINT, or one
    without a trainer, ends them.

    A SIGUSR1 without a trainer waits for one: it may be the scheduler's only notice.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    asked, ended = False, threading.Event()

    def ask_later() -> None:
        while not ask_to_stop() and not ended.wait(1.0):
            pass

    def begin_asking() -> None:
        threading.Thread(target=ask_later, name="grpo-launch-ask", daemon=True).start()

    def on_interrupt(signum: int, _: object) -> None:
        nonlocal asked
        if not asked and ask_to_stop():
            asked = True
            print("[grpo] asked to stop: checkpointing at the end of this step", file=sys.stderr, flush=True)
            if signum == signal.SIGINT:
                print("[grpo] once more to end now", file=sys.stderr, flush=True)
        elif signum == signal.SIGUSR1:
            begin_asking()
        else:
            print("[grpo] ending now", file=sys.stderr, flush=True)
            raise SignalException("interrupted", sigval=signal.SIGINT)  # as torchrun's own handler does

    before = {signum: signal.signal(signum, on_interrupt) for signum in (signal.SIGINT, signal.SIGUSR1)}
    if is_asked_already:
        begin_asking()
    try:
        yield
    finally:
        ended.set()
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _held_back() -> Iterator[list[logging.LogRecord]]:
    """Hold back torchrun's log records; those left in the list at the end are logged then."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.name.startswith(("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")):
            # Five lines about setting OMP_NUM_THREADS to 1. Every handler filters the same record.
            if record not in held and "OMP_NUM_THREADS" not in record.getMessage():
                held.append(record)
            return False
        return True

    import torch  # its handlers stand when it is loaded  # noqa: F401

    names = ("torch", "torch.distributed", "torch.distributed.elastic", "")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    for handler in handlers:
        handler.addFilter(hold)
    try:
        yield held
    finally:
        for handler in handlers:
            handler.removeFilter(hold)
        for record in held:
            logging.getLogger(record.name).handle(record)
