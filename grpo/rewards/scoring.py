"""Scoring of a rank's batch, from the first completion to TRL's call for rewards."""

import asyncio
import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from grpo.faults.users_code import NeedsMainThreadError, Worker
from grpo.faults.watch import FailureWatch
from grpo.place.timeouts import USUAL, Timeouts
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import SCORE
from grpo.rewards.batch import Notes, Rows, log_all
from grpo.rewards.function import PHASE, RewardFunction

Log = Callable[..., None]
POLL_S = 0.2  # interval at which the main thread checks for a failure elsewhere
_NEEDS = "cannot run beside the main thread: "


@dataclass(slots=True, eq=False, kw_only=True)
class _RewardCall:
    rows: list[int]
    notes: Notes = field(default_factory=Notes)
    limit: ExitStack = field(default_factory=ExitStack)
    """Holds its deadline while it runs."""
    future: "Future[list[Any]]" = field(default_factory=Future)


@dataclass(eq=False)
class Scoring:
    """Runs reward functions on a rank's batch, and returns their results when TRL calls them.

    Synchronous functions run one at a time, in one thread, in the given order; asynchronous ones run concurrently in
    the event loop. A function declared by `scores_each` starts with the completions available. If a synchronous one
    turns out to need the main thread, it and the functions after it are called there from then on. Models are left to
    TRL.
    """

    funcs: Sequence[Any]
    watch: FailureWatch
    _: KW_ONLY
    timeout_s: float
    """Time limit of one call."""
    beside: bool
    """False: each function runs where TRL calls it."""
    ahead: bool = False
    """True if completions of later batches arrive while the ranks train."""
    in_main_thread: Callable[[Any], bool] = lambda func: False
    """Returns True for a synchronous function to call in the main thread, with those after it."""
    loop: Callable[[], asyncio.AbstractEventLoop]
    """Returns the event loop for asynchronous functions."""
    timeline: Recorder = field(default_factory=Recorder)
    prepare: Callable[[], None] = lambda: None
    """Called first in the thread."""
    say: Callable[[str], None] = lambda line: None
    """Prints a line for the user."""
    timeouts: Timeouts = USUAL

    def __post_init__(self) -> None:
        self.funcs = [*self.funcs]  # a snapshot
        self._functions = [
            func
            if isinstance(func, nn.Module)
            else RewardFunction(func, self.watch, self.timeout_s, self.timeline, beside=self.beside)
            for func in self.funcs
        ]
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._rows: Rows | None = None
        self._kept: list[int] = []
        self._groups: Sequence[Sequence[int]] = []
        self._arrived: set[int] = set()
        self._calls: defaultdict[RewardFunction, list[_RewardCall]] = defaultdict(list)
        self._queued: dict[RewardFunction, _RewardCall] = {}
        """Calls not yet begun; more rows may join them."""
        may_move = [number for number, function in enumerate(self._functions) if _may_move(function)]
        self.move([number for number in may_move if self.in_main_thread(self.funcs[number])], None)

    def is_of(
        self, funcs: Sequence[Any], rows: Rows, completions: Sequence[Any], completion_ids: Sequence[Any]
    ) -> bool:
        """True if the present batch has these functions, completions and columns."""
        own = self._rows
        return (
            self.scores(funcs)
            and own is not None
            and own.hold(completions, completion_ids)
            and own.has_columns_of(rows)
        )

    def scores(self, funcs: Sequence[Any]) -> bool:
        return len(funcs) == len(self.funcs) and all(a is b for a, b in zip(funcs, self.funcs, strict=True))

    @property
    def starts_early(self) -> bool:
        """True if a function can start before all completions are there."""
        return any(map(self._starts_early, self._own()))

    def _starts_early(self, function: RewardFunction) -> bool:
        return function.runs_beside and (function.scores_ahead if self.ahead else function.unit is not None)

    def of_later_batch(self, rows: Rows, groups: Sequence[Sequence[int]]) -> "Scoring":
        """Return a scoring by the same functions and their thread, in which a later batch has begun."""
        self._worker = self._worker or Worker("grpo-rewards", self.prepare)
        other = copy.copy(self)
        other._lock, other._calls = threading.Lock(), defaultdict(list)
        other.begin(rows, groups)
        return other

    # -- a batch --------------------------------------------------------------------------------------------------

    def begin(self, rows: Rows, groups: Sequence[Sequence[int]]) -> None:
        """Begin a batch whose completions are being sampled; drops the previous one.

        Args:
            groups: rows of each prompt, on this rank.
        """
        self.drop()
        with self._lock:
            self._rows, self._groups = rows, groups

    def add(self, row: int, completion: Any, token_ids: Sequence[int]) -> None:
        """Add a finished completion. From any thread."""
        with self._lock:
            assert self._rows is not None, "a batch has begun"
            self._rows.completions[row], self._rows.completion_ids[row] = completion, [*token_ids]
            self._arrived.add(row)
            for function in self._own():
                if self._starts_early(function):
                    unit = self._unit_of(function, row)
                    if self._arrived.issuperset(unit):
                        self._submit(function, unit)

    def start(
        self,
        rows: Rows,
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        groups: Sequence[Sequence[int]],
        *,
        refused: Sequence[bool] | None = None,
    ) -> None:
        """Start scoring everything left: all completions are there.

        Args:
            refused: True for each row to leave out; it gets no reward.
        """
        with self._lock:
            if self._rows is None:
                early = set[int]()
            else:  # early scores count if the completion is unchanged; otherwise it is scored again
                known = zip(self._rows.completions, self._rows.completion_ids, completions, completion_ids, strict=True)
                early = {
                    row
                    for row, (text, ids, its_text, its_ids) in enumerate(known)
                    if row in self._arrived and text == its_text and ids == [*its_ids]
                }
            rows.completions[:], rows.completion_ids[:] = completions, completion_ids
            self._rows, self._groups = rows, groups
            self._kept = [row for row in range(len(rows)) if refused is None or not refused[row]]
            for function in self._own():
                if function.runs_beside:
                    self._submit_rest(function, early)

    def stand_ins(self) -> list[Any]:
        """Return replacements of the functions for TRL to call once each: they return the functions' results."""
        return [
            function
            if isinstance(function, nn.Module)
            else self._awaiting(function)
            if function.is_async and not function.runs_beside
            else partial(self._collect, function)
            for function in self._functions
        ]

    def compare(self) -> list[bool]:
        """Find functions that need the main thread: they say so, or give other results outside it.

        The latter is tested on one group of the batch, which has started: once in the thread, twice in the main thread.
        If both results of the main thread agree and the first differs, the first is wrong. Skips models, asynchronous
        functions, and functions that raise or take longer than `timeouts.compare_s`. Not collective.
        """
        rows = next((kept for group in self._groups if (kept := [row for row in group if row in self._kept])), [])
        answering = [function for function in self._own() if function.runs_beside and self._has_answered(function)]
        return [
            _may_move(each) and (not each.runs_beside or (each in answering and self._answers_otherwise(each, rows)))
            for each in self._functions
        ]

    def move(self, functions: Sequence[int], why: str | None) -> None:
        """Call these functions, and those after them, in the main thread, in this batch and from then on.

        Args:
            functions: their indices.
            why: logged for the first one not called there before; None: nothing is logged.
        """
        for function in (self._functions[number] for number in functions):
            if function.runs_beside:
                self._move_to_main_thread(function, why)

    def _has_answered(self, function: RewardFunction) -> bool:
        """Wait for its calls: no other one may run while it is called in the main thread."""
        if function.is_async:
            return False
        try:
            with self.timeline.span(SCORE, name=function.name), self.watch.during(PHASE):
                for call in self._calls[function]:
                    self._await(call)
        except NeedsMainThreadError as error:
            self._move_to_main_thread(function, _NEEDS + str(error))
        except Exception:  # noqa: BLE001  raised where TRL calls it
            self.watch.check()
            return False
        return function.runs_beside and bool(self._kept)

    def _answers_otherwise(self, function: RewardFunction, rows: Sequence[int]) -> bool:
        assert self._worker is not None, "it was called there before"
        call, begun, here = _RewardCall(rows=[*rows]), time.monotonic(), list[torch.Tensor]()
        try:
            call.future = self._worker.run(partial(function.call_in_thread, self._arguments(call), call.limit))
            beside = _numbers(self._await(call))
            while len(here) < 2:
                if time.monotonic() - begun > self.timeouts.compare_s:
                    self.say(f"{function.name} is slow: its rewards in the main thread were not compared")
                    return False
                here.append(_numbers(function.call_here(self._arguments(_RewardCall(rows=[*rows])))))
            return _same(*here) and not _same(beside, here[0])
        except NeedsMainThreadError:  # for these rows; it has scored others there
            return True
        except Exception:  # noqa: BLE001  of the function: then nothing is known
            self.watch.check()
            return False

    def drop(self) -> None:
        """Drop the batch; running calls finish, and are ignored."""
        with self._lock:
            for calls in self._calls.values():
                for call in calls:
                    call.future.cancel()
                    call.limit.close()
            self._calls, self._queued, self._arrived, self._rows = defaultdict(list), {}, set(), None

    # -- calls ----------------------------------------------------------------------------------------------------

    def _own(self) -> Iterator[RewardFunction]:
        return (function for function in self._functions if isinstance(function, RewardFunction))

    def _unit_of(self, function: RewardFunction, row: int) -> Sequence[int]:
        return [row] if function.unit == "completion" else next(group for group in self._groups if row in group)

    def _submit_rest(self, function: RewardFunction, early: "set[int]") -> None:
        """Submit all rows without a valid call."""
        good = [call for call in self._calls[function] if early.issuperset(call.rows)]
        for call in self._calls[function]:
            if call not in good:
                call.future.cancel()
        self._calls[function] = good
        if (queued := self._queued.get(function)) is not None and queued not in good:
            del self._queued[function]
        under_way = {row for call in good for row in call.rows}
        rest = [row for row in self._kept if row not in under_way]
        if function.unit is None or not function.is_async:
            units: Sequence[Sequence[int]] = [rest]
        else:
            units = [[row] for row in rest] if function.unit == "completion" else self._groups
        for unit in units:
            if rows := [row for row in unit if row in rest]:
                self._submit(function, rows)

    def _submit(self, function: RewardFunction, rows: Sequence[int]) -> None:
        """Submit a call; with the lock held."""
        if function.is_async:
            call = _RewardCall(rows=[*rows])
            arguments = self._arguments(call)
            loop = self.loop()
            loop.call_soon_threadsafe(self.prepare)
            call.future = asyncio.run_coroutine_threadsafe(function.call_async(arguments, call.limit), loop)
            self._calls[function].append(call)
        elif (queued := self._queued.get(function)) is not None:
            queued.rows += rows
        else:
            call = self._queued[function] = _RewardCall(rows=[*rows])
            self._worker = self._worker or Worker("grpo-rewards", self.prepare)
            call.future = self._worker.run(partial(self._run, function, call))
            self._calls[function].append(call)

    def _run(self, function: RewardFunction, call: _RewardCall) -> list[Any]:
        with self._lock:
            if call not in self._calls[function]:
                raise CancelledError  # another batch has begun
            if self._queued.get(function) is call:
                del self._queued[function]
            call.rows.sort()
            arguments = self._arguments(call)
        return function.call_in_thread(arguments, call.limit)

    def _arguments(self, call: _RewardCall) -> dict[str, Any]:
        assert self._rows is not None, "a batch has begun"
        return self._rows.of(call.rows, call.notes)

    # -- results for TRL --------------------------------------------------------------------------------------------

    def _collect(self, function: RewardFunction, *, log_extra: Log, log_metric: Log, **_: Any) -> list[Any]:
        calls: list[tuple[_RewardCall, list[Any]]] = []
        if function.runs_beside:
            with self.timeline.span(SCORE, name=function.name), self.watch.during(PHASE):
                try:
                    calls = [(call, self._await(call)) for call in self._calls[function]]
                except NeedsMainThreadError as error:
                    self._move_to_main_thread(function, _NEEDS + str(error))
        if not function.runs_beside and self._kept:
            call = _RewardCall(rows=[*self._kept])
            calls = [(call, function.call_here(self._arguments(call)))]
        return self._rewards(function, calls, log_extra, log_metric)

    def _awaiting(self, function: RewardFunction) -> Callable[..., Any]:
        async def awaiting(*, log_extra: Log, log_metric: Log, **_: Any) -> list[Any]:
            calls: list[tuple[_RewardCall, list[Any]]] = []
            if self._kept:
                call = _RewardCall(rows=[*self._kept])
                calls = [(call, await function.call_async(self._arguments(call), call.limit))]
            return self._rewards(function, calls, log_extra, log_metric)

        return awaiting

    def _await(self, call: _RewardCall) -> list[Any]:
        """Wait in the main thread for a call, and return its result."""
        self._wait(call)
        return call.future.result()

    def _wait(self, call: _RewardCall) -> None:
        while not wait([call.future], POLL_S).done:
            self.watch.check()

    def _move_to_main_thread(self, function: RewardFunction, why: str | None) -> None:
        """Move it, and all later synchronous ones, which may rely on its effects, to the main thread."""
        with self._lock:
            moved = [each for each in self._functions[self._functions.index(function) :] if _may_move(each)]
            calls = [call for each in moved for call in self._calls.pop(each, [])]
            for each in moved:
                each.runs_beside = False
        for call in calls:
            if not call.future.cancel():
                self._wait(call)
        if why is not None:
            names = " and ".join(each.name for each in moved)
            self.say(
                f"WARNING: {function.name} {why}; from now on rewards of {names} are computed in it, and nothing "
                "beside them"
            )

    def _rewards(
        self, function: RewardFunction, calls: Sequence[tuple[_RewardCall, list[Any]]], log_extra: Log, log_metric: Log
    ) -> list[Any]:
        """Combine results in the order of rows; None ("no reward" for TRL) for rows without a call."""
        assert self._rows is not None, "a batch has begun"
        rewards: list[Any] = [None] * len(self._rows)
        for call, values in calls:
            if len(values) != len(call.rows):
                raise ValueError(
                    f"reward function {function.name} returned {len(values)} rewards for {len(call.rows)} "
                    "completions: give one for each"
                )
            for row, value in zip(call.rows, values, strict=True):
                rewards[row] = value
        log_all([(call.rows, call.notes) for call, _ in calls], len(self._rows), log_extra, log_metric)
        return rewards


def _numbers(rewards: Sequence[Any]) -> torch.Tensor:
    """Convert to a tensor as in TRL (1.16)."""
    return torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float32)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if equal up to rounding, which may depend on the thread; NaN (no reward) equals NaN."""
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def _may_move(function: Any) -> bool:
    return isinstance(function, RewardFunction) and not function.is_async
