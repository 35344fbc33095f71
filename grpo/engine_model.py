"""Which model the engines build, before the trainer has loaded it: path, tokenizer, dtype."""

import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from grpo.config import GRPOConfig
from grpo.local_vllm import EngineModel
from grpo.placement import model_config
from grpo.topology import NodeTopology


class PrivateFolder:
    """A folder for this user's eyes alone; gone with the object, emptied by the next run if this one is killed."""

    def __init__(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        self.path = path
        self._finalizer = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def describe_model(
    model: "str | PreTrainedModel",
    args: GRPOConfig,
    processing_class: PreTrainedTokenizerBase | None,
    topology: NodeTopology,
) -> tuple[EngineModel, PrivateFolder | None]:
    """The engines' model.

    A model given as an object, or a tokenizer given beside a path, is written to a private folder under
    `<output_dir>`: configurations and tokenizer, never weights.

    Returns:
        The description, and the folder to keep as long as the engines run; None on ranks that start none.
    """
    dtype = compute_dtype(model, args)
    special_ids = tuple(processing_class.all_special_ids) if processing_class is not None else ()
    if isinstance(model, str):
        path = tokenizer = model
        revision = (args.model_init_kwargs or {}).get("revision")
    else:
        path = tokenizer = getattr(model.config, "_name_or_path", "") or ""
        revision = None
    folder = None
    if topology.is_local_main and (not isinstance(model, str) or processing_class is not None):
        folder = PrivateFolder(Path(args.output_dir) / "engine" / f"node{topology.node}-{os.getpid()}")
        if not isinstance(model, str):
            config = type(model.config).from_dict(model.config.to_dict())
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder.path)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder.path)
            path = str(folder.path)
        if processing_class is not None:
            processing_class.save_pretrained(folder.path)
            tokenizer = str(folder.path)
    return EngineModel(path=path, tokenizer=tokenizer, revision=revision, dtype=dtype, special_ids=special_ids), folder


def compute_dtype(model: "str | PreTrainedModel", args: GRPOConfig) -> torch.dtype:
    """The dtype in which the trainer computes, which is the engine's: never vLLM's `auto`."""
    # bf16 and fp16, or what the launcher's `mixed_precision` says where both are off
    if args.mixed_precision in ("bf16", "fp16"):
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[args.mixed_precision]
    if not isinstance(model, str):
        return model.dtype
    asked = (args.model_init_kwargs or {}).get("dtype", "float32")  # TRL's default
    if asked in (None, "auto"):
        return getattr(model_config(model, args), "dtype", None) or torch.float32
    return asked if isinstance(asked, torch.dtype) else getattr(torch, asked)


def check_text_only(processing_class: Any, *datasets: Any) -> None:
    """Refuse images, before anything is started.

    Raises:
        ValueError: names what would bring them.
    """
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}: local mode takes text alone; pass its "
            "tokenizer, or set vllm_mode to 'server' or 'colocate'"
        )
    for dataset in datasets:
        for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
            found = {"image", "images"} & set(getattr(part, "column_names", None) or [])
            if found:
                raise ValueError(
                    f"the data set has the column {sorted(found)[0]!r}: local mode takes text alone; remove the "
                    "column, or set vllm_mode to 'server' or 'colocate'"
                )
