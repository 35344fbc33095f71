"""Our entry point in `vllm.general_plugins`: vLLM calls `register` in every process that it starts."""

import os
from pathlib import Path

from grpo.engine.lifetime import die_with_parent
from grpo.place.patches.stdlib import name_shared_memory

HOST_MARK = "GRPO_ENGINE_FOLDER"  # in the environment of an engine host and of all that it starts: its private folder
FIRST_OUTPUT = "output.log"  # in that folder: what the host writes before it knows its log


def register() -> None:
    """Tie a process to the host that it belongs to; may run several times in a process."""
    if HOST_MARK in os.environ:  # any other vLLM on this machine is left as it is
        name_shared_memory(Path(os.environ[HOST_MARK]).name)  # `remove_traces` finds it by that
        die_with_parent()
