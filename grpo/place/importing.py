"""The import of large libraries, without what takes a fifth of its time and leads to nothing."""

import contextlib
import functools
import gc
import importlib.metadata
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the import of TRL or vLLM and all that they bring along.

    Python's garbage collector walks over all that has been imported, again and again, and finds next to nothing. And
    transformers (5.17) and TRL (1.16) read the metadata of every installed package, one after the other: once is
    enough.
    """
    was_on, read = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = functools.cache(read)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = read
        if was_on:
            gc.enable()
