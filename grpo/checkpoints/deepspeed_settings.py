"""Unsuitable DeepSpeed behaviour: settings that would break checkpoints, and a slow import."""

from collections.abc import Mapping
from typing import Any

from grpo.place.patches.torch import compiling_later


def check_deepspeed(config: Mapping[str, Any] | None) -> None:
    """Refuse DeepSpeed's asynchronous checkpoint writers: they return before they have written.

    Their files appear at some later step, without a notification: a checkpoint would count before it is complete. Saves
    are flushed to disk in the background anyway.

    Args:
        config: DeepSpeed's; None without DeepSpeed.

    Raises:
        ValueError: names the key.
    """
    if not config:
        return
    checkpoint = config.get("checkpoint") or {}
    late = {
        "checkpoint.writer.decoupled": (checkpoint.get("writer") or {}).get("decoupled"),
        "datastates_ckpt": config.get("datastates_ckpt", False),  # the key's presence enables it (0.19)
    }
    for key, value in late.items():
        if value is not None and value is not False:
            raise ValueError(
                f"DeepSpeed's {key} is {value!r}: it says that a checkpoint is written before it is, so that a crash "
                "could leave one that counts and is not whole. Remove it: what a save has written goes to the disk "
                "beside training anyway"
            )


def import_deepspeeds_muon() -> None:
    """Import DeepSpeed's Muon, needed for any optimizer (0.19), without its compilation of a second.

    Muon compiles three functions on import, for which torch loads its compiler. Here they are compiled at their first
    call.
    """
    with compiling_later():
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
