"""The import of large libraries, without what takes a fifth of its time and leads to nothing."""

import contextlib
import gc
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
