"""Tools that a model calls: code of the user's, which may raise, return anything, or not return at all."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.faults.worker import Worker, surviving

Message = dict[str, Any]
HANGS = "an earlier call has not returned"  # an environment may be in any state


class TooManyAbandoned(RuntimeError):
    """More tool calls hang than the user allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """What one conversation may call, by name."""

    sync: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    asynchronous: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


class ToolRunner:
    """Runs the tool calls of a rank's conversations, inside of an event loop.

    Args:
        timeout_s: of a call. One that takes longer is left alone, and the model is told that it failed.
        max_threads: in which calls of synchronous tools run at a time; those that were left alone do not count. With 1
            it is the same thread for all calls.
        max_abandoned: calls that may be left alone over the run.
        say: tells the user of one that was.
        prepare: called first in each of these threads.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        max_threads: int,
        max_abandoned: int,
        say: Callable[[str], None] = lambda line: None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        """Of the present batch: calls, those that failed, and of these those that were left alone."""
        self.running: dict[int, str] = {}
        """What runs now, by a number of no meaning."""
        self._max_abandoned, self._say = max_abandoned, say
        self._num_abandoned = self._number = 0
        self._first_abandoned = ""
        self._places = asyncio.Semaphore(max_threads)
        self._prepare = prepare
        self._idle: list[Worker] = []
        self._told: set[str] = set()
        self.hanging_rows: set[int] = set()
        """Of the present batch, in which a call was left alone."""

    def begin(self) -> None:
        """A new batch."""
        self.hanging_rows.clear()
        self.counts.clear()

    async def run(self, calls: Sequence[Mapping[str, Any]], toolbox: Toolbox, row: int) -> list[Message]:
        """The tool messages that answer an assistant's calls, in TRL's order (1.16): asynchronous ones last.

        Synchronous calls of a conversation run one after the other, asynchronous ones together.
        """
        self.counts["calls"] += len(calls)
        results: list[tuple[str, Any]] = []
        later: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        for call in calls:
            name = _told(call.get("function", {}).get("name") or call.get("name", "unknown"))
            if row in self.hanging_rows:
                results.append((name, self._failed(HANGS)))
                continue
            if call.get("type") != "function":
                results.append((name, self._failed(f"Unsupported tool call type: {call.get('type')}")))
                continue
            arguments = call["function"].get("arguments", {})
            if name in toolbox.sync:
                results.append((name, await self._in_thread(name, toolbox.sync[name], arguments, row)))
            elif name in toolbox.asynchronous:
                try:
                    later.append((name, toolbox.asynchronous[name](**arguments)))
                except Exception as error:  # noqa: BLE001  wrong arguments
                    results.append((name, self._failed(_told(error))))
            else:
                results.append((name, self._failed(f"Tool {name} not found.")))
        awaited = await asyncio.gather(*(self._awaited(name, call, row) for name, call in later))
        results += [(name, result) for (name, _), result in zip(later, awaited, strict=True)]
        return [{"role": "tool", "name": name, "content": self._content(result)} for name, result in results]

    # -- one call -------------------------------------------------------------------------------------------------

    async def _in_thread(self, name: str, tool: Callable[..., Any], arguments: Any, row: int) -> Any:
        async with self._places:
            worker = self._idle.pop() if self._idle else Worker("grpo-tool", self._prepare)
            with self._noted(name, row):
                done = asyncio.wrap_future(worker.run(lambda: tool(**arguments)))
                finished, _ = await asyncio.wait([done], timeout=self.timeout_s)
            if not finished:
                return self._left_alone(name, row)  # and its thread with it
            self._idle.append(worker)
        return self._outcome(name, done)

    async def _awaited(self, name: str, coroutine: Coroutine[Any, Any, Any], row: int) -> Any:
        if row in self.hanging_rows:  # by a synchronous call of the same message
            coroutine.close()
            return self._failed(HANGS)
        call = asyncio.ensure_future(surviving(coroutine))
        try:
            with self._noted(name, row):
                finished, _ = await asyncio.wait([call], timeout=self.timeout_s)
        finally:
            call.cancel()  # which it may not heed; if it still runs
        if not finished:
            return self._left_alone(name, row)
        return self._outcome(name, call)

    def _outcome(self, name: str, done: "asyncio.Future[Any]") -> Any:
        if done.cancelled():
            return self._failed("cancelled")
        if (raised := done.exception()) is None:
            return done.result()
        if name not in self._told:  # the model is told each time, the user once: it may be the tool that is wrong
            self._told.add(name)
            self._say(f"WARNING: tool {name} raised {type(raised).__name__}: {_told(raised)}; the model is told so")
        return self._failed(_told(raised))

    @contextlib.contextmanager
    def _noted(self, name: str, row: int) -> Iterator[None]:
        """While a call runs it can be named."""
        self._number += 1
        number = self._number
        self.running[number] = f"tool {name} of row {row}"
        try:
            yield
        finally:
            del self.running[number]

    def _failed(self, why: str) -> dict[str, str]:
        self.counts["failures"] += 1
        return {"error": why}

    def _left_alone(self, name: str, row: int) -> dict[str, str]:
        self._num_abandoned += 1
        self.counts["abandoned"] += 1
        self.hanging_rows.add(row)
        hangs = f"has not returned within {self.timeout_s:g} s (tool_timeout)"
        told = f"tool {name}, called in row {row}, {hangs}"
        self._first_abandoned = self._first_abandoned or told
        if self._num_abandoned > self._max_abandoned:
            raise TooManyAbandoned(
                f"more than {self._max_abandoned} tool calls hang on this rank (max_abandoned_tools) [GRPO-609]; the "
                f"first one: {self._first_abandoned}"
            )
        self._say(f"WARNING: {told}; the model is told so, and its thread is left alone")
        return self._failed(f"tool {name} {hangs}")

    def _content(self, result: Any) -> Any:
        if isinstance(result, list) and all(isinstance(each, dict) and "type" in each for each in result):
            return result  # blocks of text and images, as TRL takes them
        try:
            return _text(str(result))
        except Exception as error:  # noqa: BLE001  the user's own __str__
            return str(self._failed(f"its result cannot be shown: {type(error).__name__}: {_told(error)}"))


def _told(value: Any) -> str:
    """In words that every screen and tokenizer takes; the model may have said them."""
    try:
        return _text(str(value))
    except Exception:  # noqa: BLE001  the user's own __str__
        return type(value).__name__


def _text(text: str) -> str:
    """Without what is no Unicode: half of a surrogate pair, bytes that are no UTF-8 (`errors="surrogateescape"`)."""
    return text.encode("utf-8", "replace").decode()
