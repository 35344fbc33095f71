"""Checksum of a tensor's bits; detects dropped, repeated or swapped pages.

The trainer computes it for sent tensors, vLLM's workers for received tensors and for those their loaders read. Imports
torch alone.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PAGE_BYTES = 2**14
_WORD_BYTES = 8  # torch sums 64-bit words without a cast: 38 GB/s on one core, 1 GB/s for 32-bit ones (2.11)
_PAGE_WORDS = PAGE_BYTES // _WORD_BYTES
_PIECE_BYTES = 4096 * PAGE_BYTES


def page_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of p times page p, p = 1, 2, ..., modulo 2**64: [] int64 on the tensor's device, equal on any device.

    A page has 16 KiB, counted from the tensor's start, and its value is the sum of its 64-bit words; trailing bytes are
    padded with zeros to a word. The order of words within a page is not detected. On CUDA queued on the current stream.

    Args:
        tensor: contiguous, of any dtype.
    """
    flat = tensor.detach().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_BYTES == 0:
        return _sum_of(flat, 1)
    total = flat.new_zeros((), dtype=torch.int64)  # torch views words only at aligned addresses: copy, in pieces
    for index, piece in enumerate(flat.split(_PIECE_BYTES)):
        total += _sum_of(piece.clone(), 1 + index * (_PIECE_BYTES // PAGE_BYTES))
    return total


def _sum_of(flat: torch.Tensor, first_page: int) -> torch.Tensor:
    """Sum of aligned [bytes] uint8, with the given number for the first page."""
    num_words, tail = divmod(flat.numel(), _WORD_BYTES)
    num_pages = num_words // _PAGE_WORDS
    words = flat[: num_words * _WORD_BYTES].view(torch.int64)
    rest = words[num_pages * _PAGE_WORDS :].sum()
    if tail:
        last = flat.new_zeros(_WORD_BYTES)
        last[:tail] = flat[-tail:]
        rest += last.view(torch.int64)[0]
    rest *= first_page + num_pages
    if num_pages:
        pages = words[: num_pages * _PAGE_WORDS].view(num_pages, _PAGE_WORDS).sum(1)
        rest += (pages * torch.arange(first_page, first_page + num_pages, device=flat.device)).sum()
    return rest


def fetched(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Copy sums to the host together; waits for their device.

    Args:
        sums: [] int64 each, by tensor name.
    """
    devices = {each.device for each in sums.values()}
    values: dict[str, int] = {}
    for device in devices:
        here = {name: each for name, each in sums.items() if each.device == device}
        values |= dict(zip(here, torch.stack([*here.values()]).tolist(), strict=True))
    return values


class _Place(NamedTuple):
    """Location of a tensor in a storage."""

    begin: int
    """Offset in bytes, like `end`."""
    end: int
    name: str


class ArrivedSums:
    """Sums of the tensors received in one weight sync, and of the same memory when vLLM's loaders read it. This may be
    much later: loaders wait for the other tensors of their layer."""

    def __init__(self) -> None:
        self._arrived: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        self._overwritten: set[str] = set()
        # By storage, in order. The reference keeps a storage's identity from being given to another one.
        self._places: dict[int, tuple[StorageWeakRef, list[_Place]]] = {}

    def arrive(self, name: str, tensor: torch.Tensor) -> None:
        """Add one received, contiguous tensor; unloaded tensors in the same memory are marked as overwritten."""
        self._arrived[name] = page_sum(tensor)
        storage = tensor.untyped_storage()
        begin = tensor.storage_offset() * tensor.element_size()
        new = _Place(begin, begin + tensor.nbytes, name)
        _, places = self._places.setdefault(storage._cdata, (StorageWeakRef(storage), []))
        first = bisect_right(places, new.begin, key=lambda place: place.end)
        last = max(first, bisect_left(places, new.end, key=lambda place: place.begin))
        self._overwritten |= {place.name for place in places[first:last]} - self._loaded.keys()
        places[first:last] = [new]

    def load(self, weight: torch.Tensor) -> None:
        """Sum the whole tensor that contains `weight`, when the first part of it is loaded.

        Tensors computed by a model from received ones are in other memory, and are skipped.
        """
        _, places = self._places.get(weight.untyped_storage()._cdata, (None, []))
        begin = weight.storage_offset() * weight.element_size()
        at = bisect_right(places, begin, key=lambda place: place.begin) - 1
        if at >= 0 and (place := places[at]).name not in self._loaded:
            whole = torch.empty(0, dtype=torch.uint8, device=weight.device)
            whole.set_(weight.untyped_storage(), place.begin, (place.end - place.begin,))
            self._loaded[place.name] = page_sum(whole)

    def changed(self, sent: Mapping[str, int]) -> list[str]:
        """List tensors whose bits differ from the sent ones, one line each; waits for the device.

        Args:
            sent: the trainer's sums, by the names in the weight sync.
        """
        values = fetched(
            {f"arrived {name}": each for name, each in self._arrived.items()}
            | {f"loaded {name}": each for name, each in self._loaded.items()}
        )
        lines = []
        for name, value in sent.items():
            arrived = values.get(f"arrived {name}")
            if arrived != value:
                lines.append(f"{name}: other bits arrived than were sent")
            elif name in self._overwritten or values.get(f"loaded {name}", arrived) != arrived:
                lines.append(f"{name}: its memory was used again between its arrival and its loading")
        return lines
