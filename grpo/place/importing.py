"""Faster, quieter imports of large libraries: garbage collection paused, messages without use for the user silenced."""

import atexit
import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator

from grpo.place.patches.stdlib import reading_packages_once
from grpo.place.same_everywhere import built_for_another_torch


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context manager around the import of TRL or vLLM and their dependencies.

    Silences known messages (`quiet`). Pauses Python's garbage collector: it would scan all imported objects over and
    over, and find next to nothing. Later collections skip them too, unless torch was imported before: a model made by
    then must stay collectable.
    """
    quiet()
    was_on, can_freeze = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        with reading_packages_once():
            yield
    except (ImportError, RuntimeError) as error:
        if unfit := built_for_another_torch():
            raise ImportError(f"{unfit} [GRPO-216]") from error
        raise
    finally:
        if can_freeze:
            gc.freeze()
            atexit.register(gc.unfreeze)  # else triton complains of what is left at the end
        if was_on:
            gc.enable()


_SILENCED = (
    "Setting accelerator to CPU.",
    "Failed to load CPU gemm_4bit_forward",
    "Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1,",
)


def quiet() -> None:
    """Silence known messages of libraries in this process. Loads none of them; may be called again."""
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops", "accelerate.accelerator"):
        logging.getLogger(name).addFilter(_is_for_somebody)
    # DeepSpeed 0.19 calls collectives by names deprecated in torch 2.13: one warning per call site, into the progress
    # bar.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def _is_for_somebody(record: logging.LogRecord) -> bool:
    # These messages are noise. Without a GPU: if one was expected, `devices.count_gpus` ends the job; otherwise the
    # trainer logs "on CPUs". A kernel for packed 4-bit weights: no layer uses it (`compute_in`). Accumulation steps:
    # transformers counts them itself, so accelerate always has 1 and warns in every run.
    return not record.getMessage().startswith(_SILENCED)
