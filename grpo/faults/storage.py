"""Whether a node's folder of logs, which is the run's, takes writes.

A file server that hangs, or a file system that is frozen, holds whoever writes there, in the kernel, where no signal
ends it. A process of its own tries: what becomes of it keeps nothing else. Servers that fail over take minutes, and a
job survives that.
"""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

LOOK_S = 10.0
USUAL_S = 0.05  # more than it takes where nothing hangs


class Storage:
    """Looks at the folder every `LOOK_S`.

    Args:
        warn_s: without an answer until the user is warned.
        limit_s: until the job has failed.
    """

    def __init__(
        self, *, warn_s: float, limit_s: float, warn: Callable[[str], object], fail: Callable[[str], object]
    ) -> None:
        self.folder: Path | None = None
        """None: not known yet."""
        self._warn_s, self._limit_s, self._warn, self._fail = warn_s, limit_s, warn, fail
        self._trial: subprocess.Popen | None = None
        self._tried_s = 0.0
        self._is_warned = False

    def look(self, now_s: float) -> None:
        """Once an interval; by a clock that stands still while this process is held."""
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
        if hung_s > self._limit_s:
            self._fail(f"{what} (rank_stall_timeout) [GRPO-622]")
        elif hung_s > self._warn_s and not self._is_warned:
            self._is_warned = True
            self._warn(f"warns that {what}")
