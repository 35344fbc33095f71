"""What is silenced, and what is not."""

import logging
import warnings

import pytest

from grpo.job.quiet import quiet


def test_named_messages_alone_are_silenced(caplog: pytest.LogCaptureFixture) -> None:
    quiet()
    quiet()
    logger = logging.getLogger("DeepSpeed")
    assert len(logger.filters) == 1
    logger.propagate, before = True, logger.propagate
    try:
        logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
        logger.warning("something else")
    finally:
        logger.propagate = before
    assert [record.getMessage() for record in caplog.records] == ["something else"]


def test_named_warnings_alone_are_silenced() -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        quiet()
        warnings.warn("`torch.distributed.reduce_op` is deprecated, please use", FutureWarning, stacklevel=1)
        warnings.warn("`torch.nn` is deprecated", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in given] == ["`torch.nn` is deprecated"]
