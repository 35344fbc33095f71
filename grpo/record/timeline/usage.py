"""What a node's devices do, by a thread beside training: a `Usage` for each every few seconds.

It cannot disturb training: it opens no CUDA context, waits for nobody, and says what fails instead of raising it. A
sample of 8 GPUs and the node costs 0.2 ms of Python (`python -m tests.support.nvml_stand_in`; NVML's own time comes
on top).
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass

import psutil

from grpo.record.timeline.nvml import Gpus, find_gpus
from grpo.record.timeline.processes import Processes
from grpo.record.timeline.records import Usage

CLOSE_S = 2.0  # for a sample that is under way
NODE = "node"


@dataclass(eq=False)
class UsageSampler:
    """A daemon thread on a node's local main."""

    _: KW_ONLY
    attempt: int
    """Of the records."""
    devices: Sequence[str]
    """The node's GPUs by the names that the job has for them; empty on CPUs."""
    processes: Callable[[], Mapping[str, int]]
    """The pids behind "rank 8", "engine 0"; asked before each sample, for they may change, where there are no GPUs
    or NVML says nothing of them. Their children count with them."""
    put: Callable[[Usage], None]
    """Is given each record, from the thread."""
    interval_s: float
    """0: no thread."""
    own_device: str | None = None
    """The one of `devices` on which this process trains, of which torch's allocator is asked too."""
    clock: Callable[[], float] = time.time
    """Unix seconds on node 0's clock."""
    say: Callable[[str], None] = lambda line: None
    """Hears of what fails, once."""

    def __post_init__(self) -> None:
        self._devices = tuple(self.devices)
        self._gpus: Gpus | None = None
        self._trees = Processes()
        self._is_first = True
        self._has_told = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if self.interval_s > 0:
            self._thread = threading.Thread(target=self._run, name="grpo-usage", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End the thread; one that hangs (in the driver, say) is left behind. Safe to call twice."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                for record in self.sample():
                    self.put(record)
            except Exception as error:  # noqa: BLE001  of a thread that training does not depend on
                if not self._has_told:
                    self._has_told = True
                    self.say(f"WARNING: no figures of what devices use: {type(error).__name__}: {error}")
            if self._is_over.wait(self.interval_s):
                return

    def sample(self) -> Iterator[Usage]:
        """What is used now; busy since the call before. From one thread."""
        now = self.clock()
        yield self._node(now)
        if self._devices and self._is_first:
            self._gpus = find_gpus(self._devices, self.say)
        self._is_first = False
        figures = self._gpus.read() if self._gpus else {}
        for name, gpu in figures.items():
            is_own = name == self.own_device
            allocated, reserved = self._of_torch(self._devices.index(name)) if is_own else (None, None)
            yield Usage(
                attempt=self.attempt,
                time=now,
                device=name,
                **asdict(gpu),
                allocated_bytes=allocated,
                reserved_bytes=reserved,
            )
        if figures:
            return
        for name, tree in self._trees.read(self.processes()).items():
            yield Usage(attempt=self.attempt, time=now, device=name, **asdict(tree))

    def _node(self, now: float) -> Usage:
        memory = psutil.virtual_memory()
        percent = psutil.cpu_percent(interval=None)  # since this thread's call before; of its first it says 0
        busy = None if self._is_first else percent / 100 * (psutil.cpu_count() or 1)
        return Usage(
            attempt=self.attempt,
            time=now,
            device=NODE,
            busy=busy,
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
        )

    @staticmethod
    def _of_torch(index: int) -> tuple[int | None, int | None]:
        """What torch has allocated and reserved on its GPU `index`; None before it has opened CUDA itself.

        A thread's own current device would be 0, so that the index is asked for.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None, None
        stats = torch.cuda.memory_stats(index)
        return stats.get("allocated_bytes.all.current"), stats.get("reserved_bytes.all.current")
