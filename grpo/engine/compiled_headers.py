"""What torch's inductor compiles of its own headers for kernels on CPUs, kept from one engine to the next.

It goes into the folder for temporary files, whatever TORCHINDUCTOR_CACHE_DIR says (2.13, `_HEADER_DIR`), and an
engine's own such folder ends with the engine: every start would compile it again, 5 s of processor time.
"""

import contextlib
import os
from pathlib import Path


def bring_headers() -> None:
    """In an engine host, before its engine is built: let it find what earlier engines have compiled."""
    _link_all(_lasting(), _of_this_engine())


def keep_headers() -> None:
    """In an engine host whose engine is built, so that nothing is half written: let later engines find it."""
    _link_all(_of_this_engine(), _lasting())


def _of_this_engine() -> Path:
    from torch._inductor.codecache import _HEADER_DIR

    return Path(_HEADER_DIR)


def _lasting() -> Path:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "precompiled_headers"


def _link_all(source: Path, target: Path) -> None:
    """Whole files alone: an engine may be killed while it compiles, and half a file would end all later ones."""
    files = [path for path in source.glob("*") if path.is_file()]
    with contextlib.suppress(OSError):  # on different file systems, or not ours to write: it costs time alone
        target.mkdir(parents=True, exist_ok=True)
        for path in files:
            with contextlib.suppress(FileExistsError):
                os.link(path, target / path.name)
