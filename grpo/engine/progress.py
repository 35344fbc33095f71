"""How far an engine has come, in memory that its client reads: a process that is stuck need not answer for that.

The client makes the memory and hands it to the host; vLLM's EngineCore, which comes out of the host by fork, counts the
steps that it ends there. Behind the count, processes that are asked for their stacks write them.
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
_QUIET_S = 0.1  # without another line of them
_COUNT = struct.Struct("Qd")  # steps that have ended, and the seconds of the slowest


class EngineProgress:
    """The client's side of the memory."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("grpo-progress"), "w+b", buffering=0)  # noqa: SIM115  goes with this object
        self._file.truncate(_COUNT.size)
        self._file.seek(_COUNT.size)  # where stacks begin: all who write them share the position

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def read(self) -> tuple[int, float]:
        """Steps that have ended, and the seconds of the slowest."""
        steps, slowest_s = _COUNT.unpack(os.pread(self.fd, _COUNT.size, 0))
        return steps, slowest_s

    def stacks(self, pids: Sequence[int]) -> str:
        """Of those processes that can show them; they go on."""
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
    """In an engine host that has imported vLLM: let its EngineCore count, and all that come out of it show stacks."""
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)
    memory = mmap.mmap(fd, _COUNT.size)

    def count(seconds: float) -> None:
        steps, slowest_s = _COUNT.unpack_from(memory)
        _COUNT.pack_into(memory, 0, steps + 1, max(slowest_s, seconds))

    report_steps(count)


class StallWatch:
    """Decides, look by look, whether an engine is stuck: it owes completions, and no step of it ends.

    Args:
        timeout_s: that its user has set; None: `STALL_SLOW_S` on CPUs and in an engine's first generation batch, else
            `STALL_S`. In any case `SLOWEST_FACTOR` times its slowest step, where that is longer.
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
        """Once more.

        Args:
            passed_s: since the last look, while the one who looks was awake.
            owes: whether completions are under way, and nothing else is asked of the engine: a weight sync has its own
                limit.
            steps: that have ended; 0: the engine does not count.
            answers: that have come; the last ones come behind the last step.
            is_first: whether this is its first generation batch.

        Returns:
            Seconds without a step, where that is too long.
        """
        if not owes or not steps or (steps, answers) != self._seen:
            self._seen, self._still_s = (steps, answers), 0.0
            return None
        self._still_s += passed_s
        return self._still_s if self._still_s > self.limit_s(slowest_s=slowest_s, is_first=is_first) else None
