"""What a node's GPUs do, as the driver's library tells it (NVML). Opens no CUDA context."""

import importlib
import os
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
        self._told: set[str] = set()
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
        if about not in self._told:
            self._told.add(about)
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
