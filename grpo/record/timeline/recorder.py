"""Writes a node's timeline while the job runs, and costs it next to nothing: lines go to a thread that writes them."""

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
MAX_BYTES = 64 * 2**20  # with the usage of 8 GPUs every 5 s two to three days
LEAST_S = 1e-4  # shorter spans are nothing: a wait for what is there
_JOIN_S = 5.0


class Recorder:
    """Everything of one node in one attempt. Any thread may record; nothing that goes wrong here stops the job.

    On ranks that keep no timeline, and before there is one, it has no path, and drops what it is reported.

    Args:
        path: is appended to, and made if need be; beyond `MAX_BYTES` every second step and sample of usage of its older
            half goes.
        attempt: the first line of this attempt; its clock offset is taken out of every time.
    """

    def __init__(self, path: Path | None = None, attempt: AttemptLine | None = None) -> None:
        self.step = 0
        """Optimizer steps that are done; whoever trains keeps it true."""
        self._attempt = attempt
        offset_s = 0.0 if attempt is None else attempt.clock_offset_s
        self._zero = time.time() - time.monotonic() - offset_s
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._last_end_s = 0.0  # of the newest span on our own lane, by time.monotonic
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
        """The time of a moment by `time.monotonic`, on node 0's clock."""
        return self._zero + monotonic_s

    # -- recording ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def span(self, phase: str, lane: str = "", **more: Any) -> Iterator[None]:
        """Around what takes the time, whether it ends well or not.

        Args:
            lane: the local main's own, unless said.
            more: further fields of the `Span`.
        """
        begin, step = time.monotonic(), self.step
        try:
            yield
        finally:
            self.add(phase, begin, time.monotonic(), lane, step=step, **more)

    @contextlib.contextmanager
    def rest(self, phase: str) -> Iterator[None]:
        """Around what records spans on our own lane: what comes after the last of them is one, too."""
        self._last_end_s = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, self._last_end_s, time.monotonic())

    def add(
        self, phase: str, begin_s: float, end_s: float, lane: str = "", *, step: int | None = None, **more: Any
    ) -> None:
        """A span between two moments by `time.monotonic`."""
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
        """Any line, with times that are right already."""
        if self._thread is not None:
            self._lines.put(record)

    def close(self) -> None:
        """Write what is left. Safe to call twice."""
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
                lines = [self._lines.get()]  # sleeps while there is nothing
                if lines[0] is not None:
                    self._closing.wait(FLUSH_S)  # for what follows: one write for all of it
                while not self._lines.empty():
                    lines.append(self._lines.get())
                is_open = None not in lines
                _append(path, "".join(f"{to_line(line)}\n" for line in lines if line is not None))
        except Exception as error:  # noqa: BLE001  thread boundary: reported, and the job goes on without
            _log.warning("%s is not written any more: %s", path, error, extra=EVERY_RANK)
            self._thread = None


def _append(path: Path, text: str) -> None:
    # In one piece, behind whatever a killed writer has cut off: who reads meanwhile sees whole lines.
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        cut_off = file.read() not in (b"", b"\n")
        file.write(b"\n" * cut_off + text.encode())
        size = file.tell()
    if size > MAX_BYTES:
        thin_out(path)


def thin_out(path: Path) -> None:
    """Drop of the older half all spans of every second step, all devices of every second sample of usage, and no
    `AttemptLine`; a second time it has fewer to drop."""
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
