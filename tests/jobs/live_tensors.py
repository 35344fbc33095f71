"""Bytes of the tensors that are alive in this process, now and at most: what `torch.cuda.max_memory_allocated` says on
a GPU, for tensors on the CPU."""

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Follows every storage that a torch operation returns, from then on, until it is freed.

    What is alive at the start counts too. Memory that an operation takes and gives back within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        gc.collect()
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):  # isinstance would load what is lazy
                self._follow(thing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        return result

    def peak_of(self, run: Any) -> int:
        """The most that is alive while `run()` runs."""
        gc.collect()
        self.peak = self.now
        with self:
            run()
        return self.peak

    def _follow(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
