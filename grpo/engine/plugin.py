"""Entry point in `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

import os
from pathlib import Path

from grpo.engine.lifetime import die_with_parent
from grpo.place.patches.stdlib import name_shared_memory

HOST_MARK = "GRPO_ENGINE_FOLDER"  # in the environment of an engine host and its processes: its private folder
FIRST_OUTPUT = "output.log"  # in that folder: the host's output before it knows its log


def register() -> None:
    """Tie a process to its host; may run several times in a process."""
    if HOST_MARK in os.environ:  # other vLLM processes on this machine are left alone
        name_shared_memory(Path(os.environ[HOST_MARK]).name)  # the name by which `remove_traces` finds it
        die_with_parent()
