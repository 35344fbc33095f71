"""What DeepSpeed does where it should not: settings that would undo checkpoints, an import that takes long."""

from collections.abc import Mapping
from typing import Any

from grpo.place.patches.torch import compiling_later


def check_deepspeed(config: Mapping[str, Any] | None) -> None:
    """Refuse writers of DeepSpeed's that come back before they have written.

    What they write is there at a later step, of which nobody hears: a checkpoint would count before it is whole. Saves
    already go to the disk beside training.

    Args:
        config: DeepSpeed's; None where it is not used.

    Raises:
        ValueError: names the key.
    """
    if not config:
        return
    checkpoint = config.get("checkpoint") or {}
    late = {
        "checkpoint.writer.decoupled": (checkpoint.get("writer") or {}).get("decoupled"),
        "datastates_ckpt": config.get("datastates_ckpt", False),  # is on wherever the key stands (0.19)
    }
    for key, value in late.items():
        if value is not None and value is not False:
            raise ValueError(
                f"DeepSpeed's {key} is {value!r}: it says that a checkpoint is written before it is, so that a crash "
                "could leave one that counts and is not whole. Remove it: what a save has written goes to the disk "
                "beside training anyway"
            )


def import_deepspeeds_muon() -> None:
    """Import what DeepSpeed imports wherever it looks at any optimizer (0.19), without what takes a second of it.

    Three of Muon's functions are compiled there and then, for which torch loads its compiler. Here they are compiled
    when they are first called.
    """
    with compiling_later():
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
