"""Whether all nodes share the output path: the head writes a file there, and the others look for it."""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grpo.faults.deadlines import within
from grpo.ops.doctor.storage import nearest_folder

_WRITE_S = 15.0  # the others wait for the head's first word, which comes after it
_CACHING_S = 10.0  # how long an NFS client may believe that a new file is not there


@contextlib.contextmanager
def shared_file(output_dir: Path | None) -> Iterator[tuple[str, str] | None]:
    """Path and content of a file at the output path, for the others to find; None without one, or where none can be
    written, of which the node's own check tells."""
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
    """Whether the file that the head wrote shows up here, within the time that a network file system may take."""
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
    """Whether the file that another node wrote is here. Lists the folder: NFS clients believe an old listing."""
    try:
        return path.name in os.listdir(path.parent) and path.read_text() == text
    except OSError:
        return False
