"""The import of large libraries: what takes a fifth of its time is left out, what they print for nobody silenced."""

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator

from grpo.place.patches.stdlib import reading_packages_once
from grpo.place.same_everywhere import built_for_another_torch


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the import of TRL or vLLM and all that they bring along.

    Python's garbage collector walks over all that has been imported, again and again, and finds next to nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with reading_packages_once():
            yield
    except (ImportError, RuntimeError) as error:
        if unfit := built_for_another_torch():
            raise ImportError(f"{unfit} [GRPO-216]") from error
        raise
    finally:
        if was_on:
            gc.enable()


_SILENCED = (
    "Setting accelerator to CPU.",
    "Failed to load CPU gemm_4bit_forward",
    "Gradient accumulation steps mismatch: GradientAccumulationPlugin has 1,",
)


def quiet() -> None:
    """Silence them in this process. Loads none of the libraries; may be called again."""
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops", "accelerate.accelerator"):
        logging.getLogger(name).addFilter(_is_for_somebody)
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates: a line for each place, in the progress bar.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def _is_for_somebody(record: logging.LogRecord) -> bool:
    # Where there is no GPU. Where one was meant to be, `devices.count_gpus` ends the job; where none was, the trainer
    # says that it runs on CPUs. A kernel for packed weights of four bits, which no layer uses (`compute_in`). And the
    # steps of accumulation, which transformers counts by itself: accelerate has 1 of them in any run, and says so.
    return not record.getMessage().startswith(_SILENCED)
