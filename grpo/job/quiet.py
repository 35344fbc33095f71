"""What others print at every start and nobody has to act upon, silenced one by one, by name."""

import logging
import warnings

# logger -> beginnings of messages
_LOGGED = {
    # Where there is no GPU. Where one was meant to be, `devices.why_no_gpu` ends the job; where none was, the trainer
    # says that it runs on CPUs.
    "DeepSpeed": ("Setting accelerator to CPU.",),
}

# beginnings of warnings, as regular expressions
_WARNED = (
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates: a line for each place, in the progress bar.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
)


class _Unsaid(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginnings)


def quiet() -> None:
    """Silence them in this process. Loads none of the libraries; may be called again."""
    for name, beginnings in _LOGGED.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Unsaid) for each in logger.filters):
            logger.addFilter(_Unsaid(beginnings))
    for message, category in _WARNED:
        warnings.filterwarnings("ignore", message=message, category=category)
