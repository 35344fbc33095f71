"""Look a model up on the Hub, once and with a deadline: huggingface_hub's own retries take half a minute."""

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from grpo.faults.users_code import Worker

HUB_S = 5.0


def within_reach(name: str, revision: str | None) -> str:
    """Return the cached folder of a model, else `name`, if the Hub has it or the machine is offline.

    Raises:
        OSError: the Hub does not answer, or has no such model (huggingface_hub's own exceptions).
        ValueError: `name` is not a valid model id.
    """
    cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return str(Path(cached).parent)
    if constants.is_offline_mode():
        return name
    url = huggingface_hub.hf_hub_url(name, "config.json", revision=revision, endpoint=constants.ENDPOINT)
    # In a thread: a request's timeout does not cover the DNS lookup.
    asked = Worker("hub").run(lambda: huggingface_hub.get_hf_file_metadata(url, timeout=HUB_S))
    try:
        asked.result(HUB_S)
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:
        raise OSError(f"{constants.ENDPOINT} does not answer within {HUB_S:g} s: {type(error).__name__}") from error
    return name
