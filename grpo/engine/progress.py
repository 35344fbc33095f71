"""Progress of an engine, in shared memory read by its client, so that a stuck process need not answer.

The client creates the memory and passes it to the host. vLLM's EngineCore, forked from the host, counts its finished
steps there. After the counters, processes write their stacks on request.
"""

import contextlib
import faulthandler
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from grpo.faults.sessions import process_state
from grpo.faults.stacks import STACKS_SIGNAL, arranged, ask_for_stacks
from grpo.place.patches.vllm import report_steps

STALL_S = 120.0
STALL_SLOW_S = 600.0  # on CPUs, and while kernels are compiled
SLOWEST_FACTOR = 10.0  # an engine that was that slow before may be so again
SHOW_S = 2.0  # for one process to write its stacks
_QUIET_S = 0.1  # time without another line of them
_COUNT = struct.Struct("Qd")  # finished steps, and the seconds of the slowest


class EngineProgress:
    """The client's side of the memory."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("grpo-progress"), "w+b", buffering=0)  # noqa: SIM115  closed with this object
        self._file.truncate(_COUNT.size)
        self._file.seek(_COUNT.size)  # start of the stacks: all writers share the position

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def read(self) -> tuple[int, float]:
        """Return the number of finished steps, and the seconds of the slowest."""
        steps, slowest_s = _COUNT.unpack(os.pread(self.fd, _COUNT.size, 0))
        return steps, slowest_s

    def stacks(self, pids: Sequence[int]) -> str:
        """Return the stacks of those processes that support it; they keep running."""
        shown = [(pid, text) for pid in pids if (text := self._stacks(pid)) is not None]
        return "\n".join(f"process {pid} ({_title(pid)}):\n{text}" for pid, text in shown)

    def _stacks(self, pid: int) -> str | None:
        begin = end = os.fstat(self.fd).st_size
        if not ask_for_stacks(pid):
            return None
        since, until = time.monotonic(), time.monotonic() + SHOW_S
        while (now := time.monotonic()) < until and (end == begin or now - since < _QUIET_S):
            time.sleep(0.01)
            if (size := os.fstat(self.fd).st_size) > end:
                end, since = size, now
        text = os.pread(self.fd, end - begin, begin).decode(errors="replace")
        return arranged(text) or f"  shows none: its state is {process_state(pid) or 'gone'}"


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        return " ".join(command.split())[:80]
    return "gone"


def count_steps(fd: int) -> None:
    """Let EngineCore count its steps, and all forked processes write stacks on request; call it after importing
    vLLM."""
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)
    memory = mmap.mmap(fd, _COUNT.size)

    def count(seconds: float) -> None:
        steps, slowest_s = _COUNT.unpack_from(memory)
        _COUNT.pack_into(memory, 0, steps + 1, max(slowest_s, seconds))

    report_steps(count)


class StallWatch:
    """Decides from repeated observations if an engine is stuck: it has pending completions, and finishes no step.

    Args:
        timeout_s: the user's setting. None: `STALL_SLOW_S` on CPUs and in an engine's first generation batch, else
            `STALL_S`. In any case at least `SLOWEST_FACTOR` times its slowest step.
    """

    def __init__(self, timeout_s: float | None, *, on_cpu: bool) -> None:
        self._timeout_s = timeout_s
        self._on_cpu = on_cpu
        self._seen: tuple[int, int] | None = None
        self._still_s = 0.0

    def limit_s(self, *, slowest_s: float, is_first: bool) -> float:
        slow = self._on_cpu or is_first
        usual = self._timeout_s if self._timeout_s is not None else STALL_SLOW_S if slow else STALL_S
        return max(usual, SLOWEST_FACTOR * slowest_s)

    def look(
        self, passed_s: float, *, owes: bool, steps: int, answers: int, slowest_s: float, is_first: bool
    ) -> float | None:
        """Add an observation.

        Args:
            passed_s: time since the last one, while the observer was awake.
            owes: completions are pending, and no control call: a weight sync has its own limit.
            steps: number of finished ones; 0: the engine does not count.
            answers: number received; the last ones come after the last step.
            is_first: this is the engine's first generation batch.

        Returns:
            Seconds without a step, if too many.
        """
        if not owes or not steps or (steps, answers) != self._seen:
            self._seen, self._still_s = (steps, answers), 0.0
            return None
        self._still_s += passed_s
        return self._still_s if self._still_s > self.limit_s(slowest_s=slowest_s, is_first=is_first) else None
