"""The weights in a checkpoint, left on disk until each is read: safetensors, or what DeepSpeed wrote.

DeepSpeed's own `get_fp32_state_dict_from_zero_checkpoint(lazy_mode=True)` puts ZeRO-3's partitions together, one
parameter at a time. Its ZeRO-2 counterpart concatenates the whole model (0.19): there the model's own copy is read
instead, which DeepSpeed saves whole.
"""

import contextlib
import ctypes
import io
import mmap
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

RELEASE_BYTES = 16 * 2**20  # between two releases of mapped pages: finding the mappings takes a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One whole tensor on disk."""

    shape: torch.Size
    dtype: torch.dtype
    """As it is stored: float32 for ZeRO-3's master weights, whatever the model computes in."""
    load: Callable[[], torch.Tensor]
    """Reads all of it into memory of its own."""


class StoredWeights:
    """All weights of one checkpoint.

    Args:
        folder: holds every file that `tensors` read from.
        tensors: by name; a tied weight may come under each of its names.
        as_saved: True when the names are those that `save_pretrained` writes; False when they are those of the module's
            parameters, where transformers 5 holds experts fused.
        origin: for messages.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor], *, as_saved: bool, origin: str) -> None:
        self.tensors = tensors
        self.as_saved = as_saved
        self.origin = origin
        self._folder = folder
        self._unreleased_bytes = 0

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole, in memory of its own."""
        tensor = self.tensors[name].load()
        self._unreleased_bytes += tensor.nbytes
        if self._unreleased_bytes >= RELEASE_BYTES:
            _release_mapped_pages(self._folder)
            self._unreleased_bytes = 0
        return tensor


def open_weights(checkpoint: Path, *, masters: bool) -> StoredWeights:
    """Find the weights in `checkpoint`. Values are not read yet, but for parameters that ZeRO-3 held frozen.

    Args:
        masters: prefer ZeRO-3's float32 master weights to safetensors in the model's dtype.

    Raises:
        ValueError: there are none, or they cannot be read.
    """
    shards = sorted(checkpoint.glob("model*.safetensors"))
    tag = _deepspeed_folder(checkpoint)
    is_zero3 = tag is not None and any(tag.glob("zero_pp_rank_*_model_states.pt"))
    try:
        if shards and not (masters and is_zero3):
            return _open_safetensors(checkpoint, shards)
        if is_zero3:
            return _open_zero3(checkpoint)
        if tag is not None:
            return _open_zero2(checkpoint, tag)
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(f"the weights in {checkpoint} cannot be read: {type(error).__name__}: {error}") from error
    raise ValueError(
        f"{checkpoint} holds no weights: neither model*.safetensors, nor a folder that DeepSpeed's file `latest` names"
    )


def _deepspeed_folder(checkpoint: Path) -> Path | None:
    try:
        tag = (checkpoint / "latest").read_text().strip()
    except FileNotFoundError:
        return None
    return checkpoint / tag if (checkpoint / tag).is_dir() else None


def _open_safetensors(checkpoint: Path, shards: list[Path]) -> StoredWeights:
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            tensors |= {name: _mapped(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  it is no mapping
    return StoredWeights(checkpoint, tensors, as_saved=True, origin=f"{len(shards)} safetensors file(s)")


def _open_zero2(checkpoint: Path, tag: Path) -> StoredWeights:
    import deepspeed  # noqa: F401  its classes are in the pickle

    path = tag / "mp_rank_00_model_states.pt"
    module = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["module"]
    tensors = {name: _mapped(tensor) for name, tensor in module.items()}
    return StoredWeights(checkpoint, tensors, as_saved=False, origin=f"{tag.name}/{path.name}")


def _mapped(tensor: torch.Tensor) -> StoredTensor:
    """Of a tensor that is a view of a mapped file."""
    return StoredTensor(shape=tensor.shape, dtype=tensor.dtype, load=tensor.clone)


def _open_zero3(checkpoint: Path) -> StoredWeights:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # It prints, and draws progress bars, while it reads what is beside the partitions.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        lazy = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), lazy_mode=True)
    # DeepSpeed's stand-ins for tensors gather their partitions in `contiguous`. Buffers and frozen parameters are
    # tensors already, and in memory.
    tensors = {
        name: StoredTensor(shape=torch.Size(tensor.shape), dtype=tensor.dtype, load=tensor.contiguous)
        for name, tensor in lazy.items()
    }
    return StoredWeights(checkpoint, tensors, as_saved=False, origin="ZeRO-3's float32 master weights")


def _release_mapped_pages(folder: Path) -> None:
    """Take the pages of the mapped files in `folder` out of this process; the kernel may keep them as its cache.

    Otherwise every page that was ever read counts as memory of this process. No value can be lost: the mappings are
    looked up anew, nobody writes to them, and a page that is needed again is read again.
    """
    madvise = ctypes.CDLL(None).madvise
    prefix = f"{folder.resolve()}/"
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(prefix):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
