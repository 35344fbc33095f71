"""Safe loading of torch's and DeepSpeed's checkpoints: pickles can run code, so an allow-list applies.

Allowed are the objects torch, transformers and DeepSpeed store: tensors, plain values, arrays of random states, and a
few records of DeepSpeed's. Anyone with write access to a checkpoint's folder can still change numbers, but run nothing.
"""

import contextlib
import pickle
import pkgutil
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo.place.patches.torch import loading_weights_only

_OF_DEEPSPEED = (  # 0.19
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Allow a checkpoint's objects for `weights_only=True` in a `with` block."""
    from transformers.trainer_pt_utils import safe_globals  # numpy's, for random states

    classes = map(pkgutil.resolve_name, _OF_DEEPSPEED)
    with safe_globals(), torch.serialization.safe_globals([*classes]):
        yield


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Apply the allow-list to every `torch.load` in a `with` block, including DeepSpeed's."""
    with loading_weights_only(), allowed():
        yield


def load_mapped(path: Path) -> Any:
    """Load a file; its tensors stay on disk until they are read.

    Raises:
        ValueError: it contains a forbidden object; names it.
        OSError, RuntimeError: it cannot be read.
    """
    check_pickle(path)
    with allowed():  # DeepSpeed can be set to write the older format, which cannot be mapped
        return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


def check_pickle(path: Path) -> None:
    """Check a file without running any of its code.

    Raises:
        ValueError: it contains a forbidden object; names it.
        OSError, RuntimeError: it cannot be read.
    """
    from transformers.trainer_pt_utils import safe_globals

    if not zipfile.is_zipfile(path):
        _check_old_format(path)
        return
    with safe_globals():
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if foreign := set(found) - set(_OF_DEEPSPEED):  # by name: nothing is imported
        raise ValueError(_refusal(path, ", ".join(sorted(foreign))))


def _check_old_format(path: Path) -> None:
    try:
        with allowed():
            torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is None:
            raise RuntimeError(f"it is no file of torch.save's: {str(error).splitlines()[0]}") from None
        raise ValueError(_refusal(path, found[1])) from None


def _refusal(path: Path, what: str) -> str:
    return (
        f"{path} holds {what}, which neither torch nor transformers nor DeepSpeed stores [GRPO-705]: to load it could "
        "run anybody's code. If it is yours, allow it in your script: torch.serialization.add_safe_globals([...])"
    )
