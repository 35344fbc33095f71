"""Options of an export, and its output folder."""

import contextlib
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from grpo.model.text_part import PROCESSOR_FILES
from grpo.ops.space import check_disk, check_memory
from grpo.record.durable import appearing_whole

DEFAULT_SHARD_SIZE = "50GB"  # save_pretrained's own


class WeightsSummary(NamedTuple):
    """Size and dtypes of exported weights."""

    num_bytes: int
    dtypes: tuple[str, ...]
    """Names without `torch.`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of an export."""

    dtype: torch.dtype | None = None
    """Dtype to write. None: the training dtype, from the checkpoint's config.json; for an adapter's base its own."""
    max_shard_size: int | str = DEFAULT_SHARD_SIZE
    allow_incomplete: bool = False
    trust_remote_code: bool = False
    merge: bool = False
    """Merge the adapter of a LoRA run into its base."""
    base: str | None = None
    """Path of the base, a folder or a Hub id, if not the one named by the adapter."""


def check_space(out: Path, *, total_bytes: int, memory_bytes: int) -> None:
    """Refuse weights too large for the disk (OSError) or the host's memory (ValueError)."""
    check_disk(out, total_bytes, what="the weights take", option="an OUT")
    check_memory(memory_bytes)


@contextlib.contextmanager
def writing(checkpoint: Path, out: Path, options: Options) -> Iterator[Path]:
    """Yield the folder for weights; it becomes `out` atomically, with the tokenizer of `checkpoint`.

    Weights are readable by everyone who can read the other files: safetensors allows only the owner (0.8).
    """
    with appearing_whole(out) as partial:
        yield partial
        if (checkpoint / "tokenizer_config.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=options.trust_remote_code)
            tokenizer.save_pretrained(partial)
        for name in PROCESSOR_FILES:  # of a multimodal model
            if (checkpoint / name).exists():
                shutil.copyfile(checkpoint / name, partial / name)
        for file in partial.glob("*.safetensors"):
            file.chmod(0o666 & stat.S_IMODE(partial.stat().st_mode))


def summary_of(tensors: Iterable[torch.Tensor]) -> WeightsSummary:
    known = list(tensors)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in known}
    return WeightsSummary(sum(tensor.nbytes for tensor in known), tuple(sorted(dtypes)))
