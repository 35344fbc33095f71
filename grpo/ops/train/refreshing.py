"""`report_every_s`: the run's page, made anew while it trains by a process that gets what time is left."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

LOG = Path("logs") / "report.log"
_AT_THE_END_S = 120.0


class RefreshReport(TrainerCallback):
    """Runs `grpo report` on the output folder, one at a time. For rank 0."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._began_s = time.monotonic()
        self._process: subprocess.Popen | None = None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        is_busy = self._process is not None and self._process.poll() is None
        if not is_busy and time.monotonic() - self._began_s >= self._every_s:
            self._start(Path(args.output_dir))

    def finish(self, output_dir: Path, *, has_time: bool) -> None:
        """The last page: the run has ended, and says how.

        Args:
            has_time: False where training was ended: a page that is being made is given up, too.
        """
        if not has_time:
            self._end(0.0)
            return
        self._end()
        self._start(output_dir)
        self._end()

    def _start(self, output_dir: Path) -> None:
        self._began_s = time.monotonic()
        log = output_dir / LOG
        with contextlib.suppress(OSError):  # no space for its log: none for a page
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as sink:
                self._process = subprocess.Popen(
                    ["nice", sys.executable, "-m", "grpo", "report", str(output_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                )

    def _end(self, patience_s: float = _AT_THE_END_S) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
