"""The processor of a multimodal checkpoint: its tokenizer is used for training, its files are saved with the model."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoProcessor, AutoTokenizer, ProcessorMixin
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE
from trl.trainer.utils import get_config_model_id

from grpo.config import GRPOConfig
from grpo.config.models import base_of, readable_config
from grpo.faults.kinds import is_users
from grpo.model.text_part import PROCESSOR_FILES, is_multimodal
from grpo.preflight.model import check_tokenizer_files, local_model, reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Processor of images and other inputs. Training on text does not need it; a saved model does."""

    tokenizer: Any
    given: ProcessorMixin | None = None
    """The user's processor."""
    files: tuple[Path, ...] = ()
    """Otherwise files of the checkpoint's own."""

    def save(self, folder: Path) -> None:
        """Save it beside the tokenizer's files."""
        if self.given is not None:
            self.given.save_pretrained(folder)
        for file in self.files:
            shutil.copyfile(file, folder / file.name)


def load_processor(model: Any, args: GRPOConfig) -> ProcessorMixin:
    """Load the processor as TRL does, with padding on the left (1.16).

    Raises:
        ValueError: there is none.
    """
    name, revision = model_id(model, args)
    sides = {"truncation_side": "left", "padding_side": "left"}
    why = "there are no files of one"
    try:
        found = AutoProcessor.from_pretrained(
            name, revision=revision, trust_remote_code=args.trust_remote_code, **sides
        )
    except Exception as error:
        if not is_users(error):
            raise
        found, why = None, reason_of(error)
    if not isinstance(found, ProcessorMixin):  # without processor files, the folder yields a tokenizer
        raise ValueError(
            f"the processor of {name!r}, which prompts with images need, cannot be loaded ({why}): put "
            "processor_config.json and preprocessor_config.json beside the model, or give the trainer a "
            "processing_class"
        )
    return found


def processor_of(inputs: Mapping[str, Any]) -> Processor | None:
    """Return the trained model's processor; None for a text model.

    Args:
        inputs: the trainer's arguments.

    Raises:
        ValueError: there is no tokenizer.
    """
    args, given, model = inputs["args"], inputs["processing_class"], base_of(inputs["model"])
    if isinstance(given, ProcessorMixin):
        tokenizer = given.tokenizer
        tokenizer.chat_template = tokenizer.chat_template or given.chat_template
        return Processor(tokenizer=tokenizer, given=given)
    config = readable_config(model, args)
    if config is None or not is_multimodal(config):
        return None
    name, revision = model_id(model, args)
    if given is None:
        given = load_tokenizer(model, args)
        legacy = _file(name, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, revision) if given.chat_template is None else None
        if legacy is not None:
            given.chat_template = json.loads(legacy.read_text())["chat_template"]
    files = (_file(name, each, revision) for each in PROCESSOR_FILES)
    return Processor(tokenizer=given, files=tuple(file for file in files if file is not None))


def load_tokenizer(model: Any, args: GRPOConfig) -> Any:
    """Load the tokenizer as TRL does, with padding on the left (1.16).

    Raises:
        ValueError: there is none.
    """
    name, revision = model_id(model, args)
    if isinstance(model, str) and (folder := local_model(model, "the model")) is not None:
        check_tokenizer_files(folder, "the model")
    sides = {"truncation_side": "left", "padding_side": "left"}
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code, **sides)
    except Exception as error:
        if not is_users(error):
            raise
        raise ValueError(
            f"the tokenizer of {name!r} cannot be loaded ({reason_of(error)}): put tokenizer.json and "
            "tokenizer_config.json beside the model, or give the trainer a processing_class"
        ) from error


def model_id(model: Any, args: GRPOConfig) -> tuple[str, str | None]:
    """Name and revision a model was loaded from."""
    if isinstance(model, str):
        return model, (args.model_init_kwargs or {}).get("revision")
    return get_config_model_id(model.config), None


def _file(name: str, file: str, revision: str | None) -> Path | None:
    """Return a file of a folder or of the Hub; None if it does not exist or cannot be reached."""
    if Path(name).is_dir():
        return found if (found := Path(name) / file).is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None
