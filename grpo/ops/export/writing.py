"""Options of an export, and the folder that it writes."""

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
    """What an export holds."""

    num_bytes: int
    dtypes: tuple[str, ...]
    """Without `torch.`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a checkpoint is exported."""

    dtype: torch.dtype | None = None
    """None: the one that the model was trained in, which config.json in the checkpoint names; of an adapter's base its
    own."""
    max_shard_size: int | str = DEFAULT_SHARD_SIZE
    allow_incomplete: bool = False
    trust_remote_code: bool = False
    merge: bool = False
    """Of a LoRA run the base with the adapter in it, in place of the adapter."""
    base: str | None = None
    """Where that base is, a folder or a hub id, if not the one that the adapter names."""


def check_space(out: Path, *, total_bytes: int, memory_bytes: int) -> None:
    """Refuse what the disk (OSError), or the host's memory (ValueError), cannot hold."""
    check_disk(out, total_bytes, what="the weights take", option="an OUT")
    check_memory(memory_bytes)


@contextlib.contextmanager
def writing(checkpoint: Path, out: Path, options: Options) -> Iterator[Path]:
    """The folder to write weights into: it becomes `out`, whole, with the tokenizer of `checkpoint`.

    Its weights can be read by all who can read what is beside them: safetensors lets only their owner (0.8).
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
