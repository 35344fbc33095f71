"""Check that all nodes share the output path: the head writes a file there, and the others look for it."""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo.faults.deadlines import within
from grpo.ops.doctor.storage import nearest_folder

_WRITE_S = 15.0  # the others wait for the head's first message, which comes after it
_CACHING_S = 10.0  # how long an NFS client may cache a missing file


@contextlib.contextmanager
def shared_file(output_dir: Path | None) -> Iterator[tuple[str, str] | None]:
    """Yield path and content of a file at the output path, for the others to find; None without a path, or if it cannot
    be written, which this node's own check reports."""
    path = None
    if output_dir is not None:
        text = f"{socket.gethostname()} {time.time()}"
        with contextlib.suppress(OSError, TimeoutError):
            path = within(_WRITE_S, lambda: _write(nearest_folder(output_dir.absolute()), text))
    if path is None:
        yield None
        return
    try:
        yield str(path), text
    finally:
        path.unlink(missing_ok=True)


def _write(folder: Path, text: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=".grpo-doctor-", dir=folder)
    with open(descriptor, "w") as file:
        file.write(text)
    return Path(name)


def find_shared_file(path: Path, text: str) -> bool:
    """True if the head's file appears here within the caching time of a network file system."""
    deadline = time.monotonic() + _CACHING_S
    while True:
        try:
            found = within(_CACHING_S, lambda: sees_file(path, text))
        except TimeoutError:
            return False
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def sees_file(path: Path, text: str) -> bool:
    """True if the file from another node is here. Lists the folder: NFS clients cache old listings."""
    try:
        return path.name in os.listdir(path.parent) and path.read_text() == text
    except OSError:
        return False
