"""What others print at every start and nobody has to act upon, silenced one by one, by name."""

import logging
import warnings

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
