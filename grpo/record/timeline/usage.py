"""What a node's devices do, by a thread beside training: a `Usage` for each every few seconds.

It cannot disturb training: it opens no CUDA context, waits for nobody, and says what fails instead of raising it. A
sample of 8 GPUs and the node costs 0.2 ms of Python (`python -m tests.support.nvml_stand_in`; NVML's own time comes
on top).
"""

import contextlib
import importlib
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, TypeVar

import psutil

from grpo.record.timeline.records import Usage

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """What a GPU says of itself; None for what it does not say (slices of a GPU have no utilisation, say)."""

    busy: float | None
    """Share of the driver's own last sampling period, of up to a second, in which anything ran."""
    memory_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None


class Gpus:
    """GPUs by the names that the job has for them (`grpo.place.devices`). For one thread.

    A name that is a number is NVML's own number of the GPU: so does torch take it (2.13, `_get_nvml_device_index`). It
    holds where CUDA numbers as NVML does, by the bus; CUDA puts the fastest first where GPUs differ.

    Args:
        nvml: the module `pynvml`, initialised.
        say: hears once of each thing that is wrong; what is wrong with one GPU leaves the others.
    """

    def __init__(self, names: Sequence[str], nvml: types.ModuleType, say: Callable[[str], None]) -> None:
        self._nvml: Any = nvml
        self._say = say
        self._reported: set[str] = set()
        self._handles: dict[str, Any] = {}
        for name in names:
            try:
                self._handles[name] = self._find(name)
            except self._nvml.NVMLError as error:
                self._tell(name, f"NVML does not find GPU {name} ({error}): there are no figures of it")
        self._warn_of_order()

    def _find(self, name: str) -> Any:
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _warn_of_order(self) -> None:
        numbered = [handle for name, handle in self._handles.items() if name.isdecimal()]
        kinds = {self._ask("", self._nvml.nvmlDeviceGetName, handle) for handle in numbered}
        if len(kinds - {None}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            shown = ", ".join(sorted(str(kind) for kind in kinds))
            self._tell(
                "order",
                f"GPUs differ ({shown}), so that CUDA and NVML may number them differently, and figures may be "
                "another GPU's: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID in CUDA_VISIBLE_DEVICES",
            )

    def read(self) -> dict[str, GpuFigures]:
        """By name; without those of which nothing is known."""
        return {name: figures for name, handle in self._handles.items() if (figures := self._read(name, handle))}

    def _read(self, name: str, handle: Any) -> GpuFigures | None:
        rates = self._ask(name, self._nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(name, self._nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(name, self._nvml.nvmlDeviceGetPowerUsage, handle)
        if rates is None and memory is None and milliwatts is None:
            return None
        return GpuFigures(
            busy=None if rates is None else rates.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if milliwatts is None else milliwatts / 1000,
        )

    def _ask(self, name: str, question: Callable[[Any], T], handle: Any) -> T | None:
        try:
            return question(handle)
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_NOT_SUPPORTED:
                self._tell(f"{name} {question.__name__}", f"GPU {name}: {question.__name__}: {error}")
            return None

    def _tell(self, about: str, what: str) -> None:
        if about not in self._reported:
            self._reported.add(about)
            self._say(what)


def find_gpus(names: Sequence[str], say: Callable[[str], None]) -> Gpus | None:
    """`Gpus`; None where there is no NVML, which `say` hears."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        say(f"no figures of GPUs: {error}; pip install nvidia-ml-py")
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        say(f"no figures of GPUs: NVML does not work here ({error})")
        return None
    return Gpus(names, nvml, say)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    busy: float | None
    """Processor seconds for each second since the reading before, of processes that were there; None in the first."""
    memory_bytes: int
    """Resident; what processes share counts in each."""


class Processes:
    """Reads trees of processes by name, and remembers the processes of the last reading. For one thread."""

    def __init__(self) -> None:
        self._known: dict[psutil.Process, psutil.Process] = {}

    def read(self, pids: Mapping[str, int]) -> dict[str, ProcessFigures]:
        """By name, with all processes below those named, but for those below another one that is named.

        A process that ends in between is left out: from the next reading on, or from this one.
        """
        trees = {name: tree for name, pid in pids.items() if (tree := _tree(pid))}
        figures = {}
        seen: dict[psutil.Process, psutil.Process] = {}
        for name, tree in trees.items():
            below = {each for other in trees.values() if other[0] in tree[1:] for each in other}
            own = [self._known.get(each, each) for each in tree if each not in below]
            with contextlib.suppress(psutil.Error):  # its first process has ended
                figures[name] = self._figures(own)
                seen |= {each: each for each in own}
        self._known = seen
        return figures

    def _figures(self, tree: list[psutil.Process]) -> ProcessFigures:
        is_known = tree[0] in self._known
        percents, memory_bytes = [], 0
        for process in tree:
            try:
                percents.append(process.cpu_percent())  # since it was asked last, by this object; at first 0
                memory_bytes += process.memory_info().rss
            except psutil.Error:
                if process is tree[0]:
                    raise
        return ProcessFigures(busy=sum(percents) / 100 if is_known else None, memory_bytes=memory_bytes)


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


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
        self._has_reported = False
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
                if not self._has_reported:
                    self._has_reported = True
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
