"""Writer of a node's timeline during the job; lines are written by a thread, at little cost."""

import atexit
import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo.place.log import EVERY_RANK
from grpo.record.timeline.records import AttemptLine, Line, Span, Usage, to_line

_log = logging.getLogger(__name__)

FLUSH_S = 1.0
MAX_BYTES = 64 * 2**20  # two to three days, with the usage of 8 GPUs every 5 s
LEAST_S = 1e-4  # shorter spans are dropped: waits for something that is ready
_JOIN_S = 5.0


class Recorder:
    """Timeline of one node in one attempt. Any thread may record; errors here do not stop the job.

    On ranks without a timeline, and before it is opened, it has no path and drops records.

    Args:
        path: file to append to, created if missing. Beyond `MAX_BYTES`, every second step and usage sample of its older
            half is dropped.
        attempt: first line of this attempt; its clock offset is subtracted from every time.
    """

    def __init__(self, path: Path | None = None, attempt: AttemptLine | None = None) -> None:
        self.step = 0
        """Finished optimizer steps; kept up to date by the training code."""
        self._attempt = attempt
        offset_s = 0.0 if attempt is None else attempt.clock_offset_s
        self._zero = time.time() - time.monotonic() - offset_s
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._last_end_s = 0.0  # end of the newest span on our own lane, by time.monotonic
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None and attempt is not None:
            self._lines.put(attempt)
            self._thread = threading.Thread(target=self._write, args=[path], name="grpo-timeline", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # of a script that closes no trainer

    @property
    def is_on(self) -> bool:
        return self._thread is not None

    def at(self, monotonic_s: float) -> float:
        """Convert a time by `time.monotonic` to node 0's clock."""
        return self._zero + monotonic_s

    # -- recording ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def span(self, phase: str, lane: str = "", **more: Any) -> Iterator[None]:
        """Record a `with` block as a span, even if it raises.

        Args:
            lane: default: the local main's own.
            more: further fields of the `Span`.
        """
        begin, step = time.monotonic(), self.step
        try:
            yield
        finally:
            self.add(phase, begin, time.monotonic(), lane, step=step, **more)

    @contextlib.contextmanager
    def rest(self, phase: str) -> Iterator[None]:
        """Record the time after the last own-lane span in a `with` block as one more span."""
        self._last_end_s = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, self._last_end_s, time.monotonic())

    def add(
        self, phase: str, begin_s: float, end_s: float, lane: str = "", *, step: int | None = None, **more: Any
    ) -> None:
        """Record a span between two times by `time.monotonic`."""
        if self._thread is None or self._attempt is None or end_s - begin_s < LEAST_S:
            return
        if not lane:
            self._last_end_s = end_s
        self.put(
            Span(
                attempt=self._attempt.attempt,
                lane=lane or f"rank {self._attempt.ranks[0]}",
                phase=phase,
                begin=round(self.at(begin_s), 6),
                end=round(self.at(end_s), 6),
                step=self.step if step is None else step,
                **more,
            )
        )

    def put(self, record: Line) -> None:
        """Record a line with times already on node 0's clock."""
        if self._thread is not None:
            self._lines.put(record)

    def close(self) -> None:
        """Write the remaining lines. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._lines.put(None)
            self._closing.set()
            thread.join(_JOIN_S)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_open = True
            while is_open:
                lines = [self._lines.get()]  # blocks until there is a line
                if lines[0] is not None:
                    self._closing.wait(FLUSH_S)  # collect more lines for one write
                while not self._lines.empty():
                    lines.append(self._lines.get())
                is_open = None not in lines
                _append(path, "".join(f"{to_line(line)}\n" for line in lines if line is not None))
        except Exception as error:  # noqa: BLE001  thread boundary: logged, and the job goes on without
            _log.warning("%s is not written any more: %s", path, error, extra=EVERY_RANK)
            self._thread = None


def _append(path: Path, text: str) -> None:
    # One write, after any line cut off by a killed writer: concurrent readers see whole lines.
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        cut_off = file.read() not in (b"", b"\n")
        file.write(b"\n" * cut_off + text.encode())
        size = file.tell()
    if size > MAX_BYTES:
        thin_out(path)


def thin_out(path: Path) -> None:
    """Thin out the older half: drop the spans of every second step, and every second usage sample of all devices. Keeps
    every `AttemptLine`; repeated calls drop less."""
    lines = path.read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    numbers: dict[str, dict[Any, int]] = {Span.kind: {}, Usage.kind: {}}
    kept = []
    for line in lines[:half]:
        try:
            content = json.loads(line)
            kind = content["kind"]
            moment = (content["attempt"], content["step"] if kind == Span.kind else content.get("time"))
        except (ValueError, KeyError, TypeError):
            continue  # damaged
        known = numbers.get(kind)
        if known is None or known.setdefault(moment, len(known)) % 2:
            kept.append(line)
    aside = path.with_suffix(".thinner")
    aside.write_bytes(b"".join([*kept, *lines[half:]]))
    aside.replace(path)
