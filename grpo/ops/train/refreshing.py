"""`report_every_s`: a process rewrites the run's page during training, with low priority."""

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
        """Make the last page, with the end of the run.

        Args:
            has_time: False if training was aborted: a page in progress is abandoned too.
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
        with contextlib.suppress(OSError):  # no log file possible: no page either
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
