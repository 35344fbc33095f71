"""What is silenced, and what is not."""

import logging
import warnings

from grpo.place.importing import quiet


def test_quiet_silences_named_messages_alone() -> None:
    logger = logging.getLogger("DeepSpeed")
    before = len(logger.filters)
    quiet()
    quiet()
    assert len(logger.filters) <= before + 1

    def passes(message: str) -> bool:
        return bool(logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, message, (), None)))

    assert not passes("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    assert passes("something else")


def test_quiet_silences_accumulation_mismatch_of_default_alone() -> None:
    """transformers hands accelerate none; a config file that says another number than the arguments is an error."""
    quiet()
    logger = logging.getLogger("accelerate.accelerator")
    line = "Gradient accumulation steps mismatch: GradientAccumulationPlugin has {}, DeepSpeed config has 2. Using"

    def passes(message: str) -> bool:
        return bool(logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, message, (), None)))

    assert not passes(line.format(1))
    assert passes(line.format(4))


def test_quiet_silences_named_warnings_alone() -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        quiet()
        warnings.warn("`torch.distributed.reduce_op` is deprecated, please use", FutureWarning, stacklevel=1)
        warnings.warn("`torch.nn` is deprecated", FutureWarning, stacklevel=1)
    reported = [
        str(each.message) for each in given if each.category is FutureWarning
    ]  # none of other tests' open files
    assert reported == ["`torch.nn` is deprecated"]
