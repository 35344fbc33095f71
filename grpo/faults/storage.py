"""Check that a node's log folder, the run's, takes writes.

A hanging file server, or a frozen file system, blocks writers in the kernel, where no signal ends them. So a separate
process tries, and can hang alone. Servers take minutes to fail over, and a job survives it.
"""

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

LOOK_S = 10.0
USUAL_S = 0.05  # longest usual duration if nothing hangs


@dataclass(eq=False)
class Storage:
    """Checks the folder every `LOOK_S`."""

    _: KW_ONLY
    warn_s: float
    """Time without an answer before a warning."""
    limit_s: float
    """Time until the job fails."""
    warn: Callable[[str], object]
    fail: Callable[[str], object]

    def __post_init__(self) -> None:
        self.folder: Path | None = None
        """Log folder of the run; None: not known yet."""
        self._trial: subprocess.Popen | None = None
        self._tried_s = 0.0
        self._is_warned = False

    def look(self, now_s: float) -> None:
        """Check the folder, once per interval. `now_s`: from a clock that stops while this process is stopped."""
        if self._trial is not None and self._trial.poll() is None:
            self._judge(now_s - self._tried_s)
        elif self.folder is not None and now_s - self._tried_s >= LOOK_S:
            self._tried_s, self._is_warned = now_s, False
            command = ["touch", "--no-create", str(self.folder)]
            self._trial = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._trial.wait(USUAL_S)  # so that no zombie stays until the next look

    def _judge(self, hung_s: float) -> None:
        what = f"the folder {self.folder} has taken no write for {hung_s:.0f} s: its file server or disk hangs"
        if hung_s > self.limit_s:
            self.fail(f"{what} (rank_stall_timeout) [GRPO-622]")
        elif hung_s > self.warn_s and not self._is_warned:
            self._is_warned = True
            self.warn(f"warns that {what}")
