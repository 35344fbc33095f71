"""Checks of the model's name: a folder with a model, or a reachable Hub id."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from grpo.faults.kinds import is_users
from grpo.place.spelling import did_you_mean

_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken", "merges.txt", "tekken*")
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def local_model(name: str, setting: str) -> Path | None:
    """Return the folder `name` refers to; None for a Hub id.

    Args:
        setting: name of the option, for the message.

    Raises:
        ValueError: the path does not exist, or the folder has no model.
    """
    path = Path(name)
    if path.is_dir():
        _check_folder(path, setting)
        return path
    if path.is_file():
        raise ValueError(f"{setting} is the file {name}: name the folder that holds the model's config.json")
    if name.startswith("~") and path.expanduser().exists():
        raise ValueError(f"{setting} is {name}, but ~ is not expanded here: write {path.expanduser()}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip("/"):
        raise ValueError(
            f"{setting} is {name!r}, but {path.absolute()} does not exist{close_name(path)}: a model is a folder "
            "with a config.json, or a Hub id such as Qwen/Qwen3-0.6B"
        )
    return None


def check_model(name: str, setting: str, *, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """Check that trainer and engines will find the model. Reads its configuration, over the network for a Hub id.

    Raises:
        ValueError: has the searched name and place.
    """
    folder = local_model(name, setting)
    if folder is not None and not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
        raise ValueError(
            f"{setting} is {name}, which holds a config.json, but no weights ({', '.join(_WEIGHTS[:2])}): copy the "
            "whole model there"
        )
    if folder is None:
        check_hub(name, setting, revision=revision)
    from transformers import AutoConfig  # the doctor asks about folders, and has no need of it

    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:
        if not is_users(error):
            raise
        where = f" (no folder in {Path.cwd()}{close_name(Path(name))}, but a Hub id)" if folder is None else ""
        raise ValueError(
            f"{setting} is {name!r}{where}, whose configuration cannot be read: {reason_of(error)}"
        ) from error


def check_hub(name: str, setting: str, *, revision: str | None = None) -> None:
    """Check that a Hub id is in the cache, or the Hub answers: transformers would retry for minutes.

    Raises:
        ValueError: neither; the message names a way out.
    """
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json", revision=revision))
    except HfHubHTTPError:
        return  # the Hub has answered, and transformers says more about it
    except Exception as error:  # or HF_HUB_OFFLINE is set
        raise ValueError(
            f"{setting} is {name!r}, which is no folder here{close_name(Path(name))}, and as a Hub id it is not in the "
            f"cache ({constants.HF_HUB_CACHE}), and {constants.ENDPOINT} gives no answer: {reason_of(error)} "
            f"[GRPO-202]: run `hf download {name}` where there is a network, or name a local folder"
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """True if there is any file of a tokenizer."""
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS)


def check_tokenizer_files(folder: Path, setting: str) -> None:
    """Check that a model's folder has a tokenizer: without one transformers makes an empty tokenizer (5.17).

    Raises:
        ValueError: names the missing files.
    """
    if not has_tokenizer(folder):
        raise ValueError(
            f"{setting} is {str(folder)!r}, which holds no tokenizer: put tokenizer.json and tokenizer_config.json "
            "beside the model, or give the trainer a processing_class"
        )


def reason_of(error: BaseException) -> str:
    """First line of a library's error."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _check_folder(path: Path, setting: str) -> None:
    if (path / "config.json").is_file():
        return
    below = sorted(str(file.parent) for file in path.glob("*/config.json"))
    if (path / "adapter_config.json").exists():
        fix = "it holds a LoRA adapter: merge it into its base model, and name that"
    elif below:
        fix = f"did you mean {below[-1]}?"
    else:
        held = sorted(file.name for file in path.iterdir())
        fix = f"it holds {', '.join(held[:5]) + (' …' if len(held) > 5 else '') or 'nothing'}"
    raise ValueError(f"{setting} is the folder {path}, which holds no config.json: {fix}")


def close_name(path: Path) -> str:
    """Return ' (did you mean X?)' for a similar name in the same folder; '' without one."""
    try:
        names = [entry.name for entry in path.absolute().parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(path.name, names)
