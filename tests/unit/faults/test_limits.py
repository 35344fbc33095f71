"""Calls that overlap have deadlines of their own; the earliest that passes is the failure."""

import queue
import threading
from typing import Any

from grpo.faults.deadlines import CallLimits
from grpo.faults.stacks import Stacks

LONG_S = 600.0
PATIENCE_S = 60.0


class Link:
    def __init__(self) -> None:
        self.stacks = Stacks()
        self.said: list[tuple[float, str] | None] = []

    def say_limit(self, timeout_s: float, phase: str, overdue: str, *, thread: int) -> None:
        self.said.append((round(timeout_s, -1), overdue))

    def say_no_limit(self) -> None:
        self.said.append(None)


def test_call_limits_report_earliest_deadline_to_sentinel() -> None:
    link: Any = Link()
    limits = CallLimits(link, lambda cause, phase: None)
    first = limits.around("reward", LONG_S, "first")
    second = limits.around("reward", LONG_S / 2, "second")
    third = limits.around("rollout", LONG_S, "third")
    for call in (first, second, third):
        call.__enter__()
    for call in (third, second, first):
        call.__exit__(None, None, None)
    assert link.said == [(LONG_S, "first"), (LONG_S / 2, "second"), (LONG_S, "first"), None]


def test_call_limits_keep_deadline_from_start_of_call() -> None:
    link: Any = Link()
    limits = CallLimits(link, lambda cause, phase: None)
    late = limits.around("reward", 0.0, "is late already when the one before it ends")
    with limits.around("reward", -1.0, "before"):
        late.__enter__()
    assert link.said == [(0.0, "before"), (0.0, "is late already when the one before it ends")]
    late.__exit__(None, None, None)


def test_call_limits_of_lone_process_fail_in_phase_of_call() -> None:
    failed, known = [], threading.Event()

    def fail(cause: str, phase: str) -> None:
        failed.append((cause.split("\n")[0], phase))
        known.set()

    limits = CallLimits(None, fail)
    with limits.around("rollout", LONG_S, "long"), limits.around("reward", 0.01, "short"):
        assert known.wait(PATIENCE_S)
    assert failed == [("short; it was here, the innermost call first:", "reward")]


def test_call_limits_show_thread_of_overdue_call_first() -> None:
    causes: queue.SimpleQueue[str] = queue.SimpleQueue()
    limits = CallLimits(None, lambda cause, phase: causes.put(cause))
    shown = threading.Event()

    def scores() -> None:
        with limits.around("reward", 0.01, "late"):
            shown.wait(PATIENCE_S)

    others = [threading.Thread(target=shown.wait, args=[PATIENCE_S], daemon=True) for _ in range(40)]
    threading.Thread(target=scores, daemon=True).start()
    for other in others:
        other.start()
    cause = causes.get(timeout=PATIENCE_S)
    shown.set()
    assert "in scores\n" in "\n".join(cause.splitlines()[:6])
