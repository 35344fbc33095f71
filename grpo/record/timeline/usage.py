"""Usage of a node's devices, sampled by a thread during training: a `Usage` of each every few seconds.

It cannot disturb training: it opens no CUDA context, waits for nothing, and logs errors instead of raising them. A
sample of 8 GPUs and the node costs 0.2 ms of Python (`python -m tests.support.nvml_stand_in`), plus NVML's own time.
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
    """Readings of a GPU; None for unknown ones (slices of a GPU, for example, have no utilisation)."""

    busy: float | None
    """Share of the driver's last sampling period, up to a second, in which anything ran."""
    memory_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None


class Gpus:
    """GPUs by their names in the job (`grpo.place.devices`). For one thread.

    A numeric name is taken for NVML's index, as torch does (2.13, `_get_nvml_device_index`). That holds if CUDA numbers
    GPUs by bus as NVML does; by default CUDA puts the fastest first if GPUs differ.

    Args:
        nvml: the module `pynvml`, initialised.
        say: called once per kind of error; an error of one GPU does not affect the others.
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
                self._report_once(name, f"NVML does not find GPU {name} ({error}): there are no figures of it")
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
            self._report_once(
                "order",
                f"GPUs differ ({shown}), so that CUDA and NVML may number them differently, and figures may be "
                "another GPU's: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID in CUDA_VISIBLE_DEVICES",
            )

    def read(self) -> dict[str, GpuFigures]:
        """Read all GPUs, by name; GPUs without any reading are left out."""
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
                self._report_once(f"{name} {question.__name__}", f"GPU {name}: {question.__name__}: {error}")
            return None

    def _report_once(self, about: str, what: str) -> None:
        if about not in self._reported:
            self._reported.add(about)
            self._say(what)


def find_gpus(names: Sequence[str], say: Callable[[str], None]) -> Gpus | None:
    """Make `Gpus`; None without NVML, reported to `say`."""
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
    """Processor seconds per second since the last reading, of processes present then; None in the first."""
    memory_bytes: int
    """Resident memory; shared memory counts in each process."""


class Processes:
    """Reads process trees by name, and remembers the processes of the last reading. For one thread."""

    def __init__(self) -> None:
        self._known: dict[psutil.Process, psutil.Process] = {}

    def read(self, pids: Mapping[str, int]) -> dict[str, ProcessFigures]:
        """Read each named process with its descendants, except those below another named process.

        A process that ends in between is left out of this reading or of the next ones.
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
                percents.append(process.cpu_percent())  # since this object's last call; 0 at first
                memory_bytes += process.memory_info().rss
            except psutil.Error:
                if process is tree[0]:
                    raise
        return ProcessFigures(busy=sum(percents) / 100 if is_known else None, memory_bytes=memory_bytes)


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; [] if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


CLOSE_S = 2.0  # for a sample in progress
NODE = "node"


@dataclass(eq=False)
class UsageSampler:
    """Sampling thread, a daemon on a node's local main."""

    _: KW_ONLY
    attempt: int
    """Attempt of the records."""
    devices: Sequence[str]
    """GPUs of the node by their names in the job; empty on CPUs."""
    processes: Callable[[], Mapping[str, int]]
    """Returns the pids of "rank 8", "engine 0". Called before each sample, since they may change, if there are no GPUs
    or NVML has no figures for them. Child processes are included."""
    put: Callable[[Usage], None]
    """Called with each record, from the thread."""
    interval_s: float
    """Seconds between samples. 0: no thread."""
    own_device: str | None = None
    """Device of this process, among `devices`; torch's allocator is read too."""
    clock: Callable[[], float] = time.time
    """Clock with Unix seconds on node 0's clock."""
    say: Callable[[str], None] = lambda line: None
    """Called once per kind of error."""

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
        """End the thread; one that hangs (in the driver, for example) is abandoned. Safe to call twice."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                for record in self.sample():
                    self.put(record)
            except Exception as error:  # noqa: BLE001  training does not depend on this thread
                if not self._has_reported:
                    self._has_reported = True
                    self.say(f"WARNING: no figures of what devices use: {type(error).__name__}: {error}")
            if self._is_over.wait(self.interval_s):
                return

    def sample(self) -> Iterator[Usage]:
        """Sample the current usage; busy since the last call. From one thread."""
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
        percent = psutil.cpu_percent(interval=None)  # since this thread's last call; 0 at first
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
        """Bytes torch has allocated and reserved on its GPU `index`; None before the process has initialised CUDA.

        Takes the index because this thread's current device would be 0.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None, None
        stats = torch.cuda.memory_stats(index)
        return stats.get("allocated_bytes.all.current"), stats.get("reserved_bytes.all.current")
