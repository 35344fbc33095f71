"""Background flush of a checkpoint to disk during training, after the ranks have written it to the page cache."""

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from grpo.checkpoints.checkpoints import read_rank_records, write_rank_record
from grpo.record.durable import FileSum

DURABLE_S = 1800.0
"""Least deadline for all ranks' files to reach the disk."""
SLOW_BYTES_PER_S = 20e6
"""Speed of the slowest supported disk; determines the deadline of very large checkpoints."""
POLL_S = 0.5
LAST_S = 5.0  # for a process that ends for another reason: an almost finished save still counts


def deadline_for(num_bytes: int) -> float:
    """Seconds for a checkpoint of this size to reach the disk."""
    return max(DURABLE_S, num_bytes / SLOW_BYTES_PER_S)


@dataclass(eq=False)
class BackgroundSave:
    """One checkpoint on this rank: its files are flushed to disk; then rank 0 completes it for all.

    A failure is kept, and raised by `wait`.
    """

    folder: Path
    """Folder of the checkpoint; every rank has written its files."""
    _: KW_ONLY
    rank: int
    world_size: int
    complete: Callable[[Mapping[str, FileSum]], None]
    """Called on rank 0 with the sums of all files, once every rank's record is there. From a thread."""
    deadline_s: float
    """Limit for all ranks' files to reach the disk; see `deadline_for`."""

    def __post_init__(self) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {self.folder.name}", daemon=True)
        self._thread.start()
        atexit.register(self._thread.join, LAST_S)

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is done on this rank. Raises its error."""
        self._thread.join()  # has its own deadline
        atexit.unregister(self._thread.join)
        if isinstance(self._error, OSError) and not isinstance(self._error, TimeoutError):
            raise OSError(
                self._error.errno,
                f"{self.folder} did not reach the disk: {self._error}; the checkpoints before it are as they were",
            ) from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            write_rank_record(self.folder, self.rank, self.world_size)
            if self.rank == 0:
                self.complete(self._await_records())
        except Exception as error:  # noqa: BLE001  thread boundary: raised by `wait`
            self._error = error

    def _await_records(self) -> Mapping[str, FileSum]:
        begun = time.monotonic()
        sums: dict[str, FileSum] = {}
        missing = [*range(self.world_size)]
        while True:
            found, missing = read_rank_records(self.folder, missing)
            sums |= found
            if not missing:
                return sums
            if time.monotonic() - begun > self.deadline_s:
                raise TimeoutError(
                    f"{self.folder} is not complete: ranks {missing} have not flushed their files to the disk within "
                    f"{self.deadline_s:.0f} s"
                )
            time.sleep(POLL_S)
