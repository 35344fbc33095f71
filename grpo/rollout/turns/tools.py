"""Tool calls of the model: users' code, which may raise, return anything, or never return."""

import asyncio
import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from grpo.faults.deadlines import DeadlinePassed
from grpo.faults.users_code import Worker, own_streams, surviving
from grpo.model.messages import Message
from grpo.rollout.turns.declared import may_run_in_threads
from grpo.rollout.turns.environments import home_of
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.turnstile import Turnstile

HANGS = "an earlier call has not returned"  # an environment may be in any state
MAX_DECLARED = 64  # concurrent calls of tools declared for threads, if no number is given


class TooManyAbandoned(RuntimeError):
    """More tool calls hang than the user allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """Tools of one episode, by name."""

    sync: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    asynchronous: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@dataclass(eq=False)
class ToolRunner:
    """Runs the tool calls of a rank's episodes, inside an event loop."""

    _: KW_ONLY
    timeout_s: float
    """Limit of a call. A longer one is interrupted in the main thread, and abandoned elsewhere; the model receives an
    error."""
    main: MainThread
    """Runs calls of synchronous tools, in TRL's order."""
    max_threads: int | None
    """None: only tools declared for threads run in threads. A number: all of them do, with at most this many calls at a
    time; abandoned calls do not count. With 1 all calls share one thread, except those of environments."""
    max_abandoned: int
    """Calls that may exceed the limit over the run."""
    say: Callable[[str], None] = lambda line: None
    """Called with a message for the user about one that did."""
    prepare: Callable[[], None] = lambda: None
    """Called first in each thread."""

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Counts of the batch: calls, failed ones, and abandoned ones of these."""
        self.running: dict[int, str] = {}
        """Running calls, by an arbitrary number."""
        self._abandoned: list[str] = []
        self._numbers = itertools.count()
        self._places = asyncio.Semaphore(self.max_threads or MAX_DECLARED)
        self.turnstile = Turnstile(0)
        self._idle: list[Worker] = []
        self._reported: set[str] = set()
        self.hanging_rows: set[int] = set()
        """Rows of the batch with an abandoned call."""

    def begin(self, num_rows: int) -> "ToolRunner":
        """Make a runner for a new batch, beside others in progress: with its own counts, hanging rows and order. Each
        row leaves its `turnstile` when it has ended."""
        batch = copy.copy(self)
        batch.counts, batch.hanging_rows, batch.turnstile, batch.running = Counter(), set(), Turnstile(num_rows), {}
        return batch

    async def run(self, calls: Sequence[Mapping[str, Any]], toolbox: Toolbox, row: int) -> list[Message]:
        """Run an assistant's calls; return the tool messages, in TRL's order (1.16): asynchronous ones last.

        Synchronous calls of an episode run one after the other, asynchronous ones together.
        """
        self.counts["calls"] += len(calls)
        results: list[tuple[str, Any]] = []
        later: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        in_main = [
            tool for name in map(_name, calls) if (tool := toolbox.sync.get(name)) and not self._in_threads(tool)
        ]
        async with self.turnstile.turn(row, waits=bool(in_main)):
            for call in calls:
                name = _name(call)
                if row in self.hanging_rows:
                    results.append((name, self._failed(HANGS)))
                    continue
                if call.get("type") != "function":
                    results.append((name, self._failed(f"Unsupported tool call type: {call.get('type')}")))
                    continue
                arguments = call["function"].get("arguments", {})
                if name in toolbox.sync:
                    results.append((name, await self._called(name, toolbox.sync[name], arguments, row)))
                elif name in toolbox.asynchronous:
                    try:
                        later.append((name, toolbox.asynchronous[name](**arguments)))
                    except Exception as error:  # noqa: BLE001  wrong arguments
                        results.append((name, self._failed(_shown(error))))
                else:
                    results.append((name, self._failed(f"Tool {name} not found.")))
        awaited = await asyncio.gather(*(self._awaited(name, call, row) for name, call in later))
        results += [(name, result) for (name, _), result in zip(later, awaited, strict=True)]
        return [{"role": "tool", "name": name, "content": self._content(name, result)} for name, result in results]

    # -- one call -------------------------------------------------------------------------------------------------

    def _in_threads(self, tool: Callable[..., Any]) -> bool:
        return self.max_threads is not None or may_run_in_threads(tool) or home_of(tool) is not None

    async def _called(self, name: str, tool: Callable[..., Any], arguments: Any, row: int) -> Any:
        def call() -> Any:
            with own_streams(f"tool {name}"):
                return tool(**arguments)

        if self._in_threads(tool):
            return await self._in_thread(name, tool, call, row)
        with self._noted(name, row):
            done = asyncio.wrap_future(self.main.run(call, timeout_s=self.timeout_s))
            await asyncio.wait([done])
        if not done.cancelled() and isinstance(done.exception(), DeadlinePassed):
            return self._too_slow(name, row, "it is interrupted")
        return self._outcome(name, done)

    async def _in_thread(self, name: str, tool: Callable[..., Any], call: Callable[[], Any], row: int) -> Any:
        home = home_of(tool)
        async with self._places:
            worker = home or (self._idle.pop() if self._idle else Worker("grpo-tool", self.prepare))
            with self._noted(name, row):
                done = asyncio.wrap_future(worker.run(call))
                finished, _ = await asyncio.wait([done], timeout=self.timeout_s)
            if not finished:
                if home is not None:
                    home.is_lost = True
                return self._too_slow(name, row, "its thread is left alone")
            if isinstance(worker, Worker):
                self._idle.append(worker)
        return self._outcome(name, done)

    async def _awaited(self, name: str, coroutine: Coroutine[Any, Any, Any], row: int) -> Any:
        if row in self.hanging_rows:  # by a synchronous call of the same message
            coroutine.close()
            return self._failed(HANGS)
        call = asyncio.ensure_future(surviving(coroutine))
        try:
            with self._noted(name, row), own_streams(f"tool {name}"):
                finished, _ = await asyncio.wait([call], timeout=self.timeout_s)
        finally:
            call.cancel()  # it may ignore that; in case it still runs
        if not finished:
            return self._too_slow(name, row, "it is left alone")
        return self._outcome(name, call)

    def _outcome(self, name: str, done: "asyncio.Future[Any]") -> Any:
        if done.cancelled():
            return self._failed("cancelled")
        if (raised := done.exception()) is None:
            return done.result()
        if name not in self._reported:  # the model gets each error, the user one per tool: the tool may be wrong
            self._reported.add(name)
            self.say(f"WARNING: tool {name} raised {type(raised).__name__}: {_shown(raised)}; the model sees it")
        return self._failed(_shown(raised))

    @contextlib.contextmanager
    def _noted(self, name: str, row: int) -> Iterator[None]:
        """List a call in `running` during a `with` block."""
        number = next(self._numbers)
        self.running[number] = f"tool {name} of row {row}"
        try:
            yield
        finally:
            del self.running[number]

    def _failed(self, why: str) -> dict[str, str]:
        self.counts["failures"] += 1
        return {"error": why}

    def _too_slow(self, name: str, row: int, consequence: str) -> dict[str, str]:
        self.counts["abandoned"] += 1
        self.hanging_rows.add(row)
        hangs = f"has not returned within {self.timeout_s:g} s (tool_timeout)"
        reported = f"tool {name}, called in row {row}, {hangs}"
        self._abandoned.append(reported)
        if len(self._abandoned) > self.max_abandoned:
            raise TooManyAbandoned(
                f"more than {self.max_abandoned} tool calls hang on this rank (max_abandoned_tools) [GRPO-609]; the "
                f"first one: {self._abandoned[0]}"
            )
        self.say(f"WARNING: {reported}; the model sees it, and {consequence}")
        return self._failed(f"tool {name} {hangs}")

    def _content(self, name: str, result: Any) -> Any:
        if isinstance(result, list) and all(isinstance(each, dict) and "type" in each for each in result):
            if other := {each["type"] for each in result} - {"text"}:
                raise ValueError(
                    f"tool {name} returned a part of type {min(other)!r} [GRPO-617]: local mode takes text from tools; "
                    "let it return text, or a description of what there is to see"
                )
            return result  # content blocks, as TRL expects
        try:
            return _text(str(result))
        except Exception as error:  # noqa: BLE001  the user's own __str__
            return str(self._failed(f"its result cannot be shown: {type(error).__name__}: {_shown(error)}"))


def _name(call: Mapping[str, Any]) -> str:
    return _shown(call.get("function", {}).get("name") or call.get("name", "unknown"))


def _shown(value: Any) -> str:
    """Convert to text safe for any screen and tokenizer; the model may have written it."""
    try:
        return _text(str(value))
    except Exception:  # noqa: BLE001  the user's own __str__
        return type(value).__name__


def _text(text: str) -> str:
    """Replace invalid Unicode: lone surrogates, and non-UTF-8 bytes (`errors="surrogateescape"`)."""
    return text.encode("utf-8", "replace").decode()
