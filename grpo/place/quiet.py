"""What others print at every start and nobody has to act upon, silenced one by one, by name."""

import logging
import warnings


def quiet() -> None:
    """Silence them in this process. Loads none of the libraries; may be called again."""
    for name in ("DeepSpeed", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).addFilter(_is_for_somebody)
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates: a line for each place, in the progress bar.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def _is_for_somebody(record: logging.LogRecord) -> bool:
    # Where there is no GPU. Where one was meant to be, `devices.count_gpus` ends the job; where none was, the trainer
    # says that it runs on CPUs. And of a kernel for packed weights of four bits, which no layer uses (`compute_in`).
    return not record.getMessage().startswith(("Setting accelerator to CPU.", "Failed to load CPU gemm_4bit_forward"))
