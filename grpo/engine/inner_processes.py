"""Watch over vLLM's processes in an engine host while the engine starts.

vLLM's own watch has gaps then (0.31). EngineCore reads its workers' answers in the order of their ranks, so it misses a
failed one while an earlier one waits for it in a collective. An ending process waits for its children without a
deadline. The host sees the end of EngineCore only after all processes forked from it have ended. In each case the
others, and the trainer, would wait until `vllm_start_timeout`.
"""

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.engine.messages import Died
from grpo.engine.plugin import HOST_MARK
from grpo.faults.failure import FailureKind
from grpo.faults.kinds import kind_of, text_of
from grpo.faults.sessions import session_members
from grpo.place.patches.vllm import report_processes, spin_for

POLL_S = 0.5
GRACE_S = 4.0  # for vLLM's own report, which has more detail
# longer than a token of a small model takes: waking waiting processes would cost a tenth of generation there
SPIN_S = 0.05
_FOLDER = "inner"  # in the host's private folder; a file for each process: a line at its start, and for each failure


def report_failures() -> None:
    """Let vLLM's processes, forked from this host, report their failures; call it after importing vLLM."""
    report_processes(_reporting, _say_error)


def share_cores() -> None:
    """Make idle processes of an engine on CPUs leave the cores to the ranks.

    By default each would poll for messages without a pause for a second after the last one, most of the training time.
    """
    spin_for(SPIN_S)


def _reporting(run: Callable[..., None], name: str) -> Callable[..., None]:
    """Wrap the main function of a process with records of its start and end."""

    @functools.wraps(run)
    def reporting(*args: Any, **kwargs: Any) -> None:
        _say("")
        try:
            run(*args, **kwargs)
        except BaseException as error:
            _say_error(error, f"{name} has ended")
            raise
        _say(f"{name} has ended")

    return reporting


def _say_error(error: BaseException, what: str = "a worker of vLLM failed") -> None:
    _say(f"{what}: {text_of(error)}", kind_of(error))


def _say(cause: str, kind: FailureKind = FailureKind.ENGINE) -> None:
    folder = Path(os.environ[HOST_MARK]) / _FOLDER
    with contextlib.suppress(OSError):  # the folder is removed when the engine is ended
        folder.mkdir(exist_ok=True)
        with (folder / str(os.getpid())).open("a") as record:  # the first cause stays the first
            record.write(json.dumps({"cause": cause, "kind": kind}) + "\n")


class StartWatch:
    """Calls `fail` if one of vLLM's inner processes has failed while the engine is built.

    Args:
        fail: called from another thread, with the cause, if vLLM has not reported it itself within `grace_s`.
    """

    def __init__(self, private_folder: Path, fail: Callable[[Died], None], *, grace_s: float = GRACE_S) -> None:
        self._folder = private_folder / _FOLDER
        self._fail = fail
        self._grace_s = grace_s
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="grpo-start-watch", daemon=True).start()

    def end(self) -> None:
        """Stop watching: the engine is ready."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            died = self.cause()
            if died is not None and not self._is_over.wait(self._grace_s):
                self._fail(died)
                return

    def cause(self) -> Died | None:
        """Reason why the engine cannot become ready, as reported by its processes; None if there is none."""
        found: list[Died] = []
        with contextlib.suppress(OSError, ValueError):  # an incomplete line: the next look finds it complete
            running = set(session_members(os.getsid(0)))
            for record in sorted(self._folder.iterdir(), key=lambda record: int(record.name)):
                said = [Died(**json.loads(line)) for line in record.read_text().splitlines()]
                if len(said) == 1 and int(record.name) not in running:
                    said.append(Died(cause=f"a process of vLLM (pid {record.name}) was killed"))
                found += said[1:]
        if not found:
            return None
        # A process that misses another one ends as an engine's does; one with an error of its own is more precise.
        kind = next((each.kind for each in found if each.kind != FailureKind.ENGINE), FailureKind.ENGINE)
        reported = "; ".join(each.cause for each in found)
        return Died(cause=f"vLLM's processes fail while it starts [GRPO-403]: {reported}", kind=kind)
