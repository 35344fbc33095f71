"""HTTP server for agents on this rank, for OpenAI's clients and for clients with token ids.

Bad input does not slow down other agents: a request without a key is refused before its body is read, a body has a size
limit and a deadline, and no request waits for another one.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import resource
import secrets
import socket
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from trl.trainer.utils import start_event_loop_in_daemon

from grpo.place.log import FILE_ONLY
from grpo.place.timeouts import USUAL, Timeouts
from grpo.rollout.agents.episode import AgentEpisode
from grpo.rollout.agents.protocol import (
    MODEL,
    AgentReply,
    ChatRequest,
    GenerateRequest,
    RequestError,
    chat_chunks,
    chat_completion,
    generated,
    messages_of,
    models,
    parse,
)
from grpo.rollout.turns.sampler import BatchOver

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
START_S = 30.0
ANYWHERE = ("0.0.0.0", "::")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Endpoint of an agent for queries to the engines.

    client = AsyncOpenAI(base_url=door.url, api_key=door.key)
    """

    url: str
    """Base URL for OpenAI's clients: `http://HOST:PORT/ROW/v1`."""
    key: str = field(repr=False)
    """Secret of this row alone."""
    model: str
    """Model name for clients that require one; any name works."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Guest:
    """An admitted agent."""

    key: str
    episode: AgentEpisode
    asking: set["asyncio.Task[Any]"] = field(default_factory=set)


class DoorServer:
    """Serves the agents of a rank, batch after batch, in a thread with its own event loop.

    Args:
        host: address to listen on: 127.0.0.1, or 0.0.0.0 for agents in containers.
        say: called for warnings, once each.

    Raises:
        ValueError: it cannot listen there.
    """

    def __init__(self, host: str, say: Callable[[str], None], timeouts: Timeouts = USUAL) -> None:
        self._host, self._say, self._body_s = host, say, timeouts.agent_body_s
        self._guests: dict[str, _Guest] = {}
        self._ignored: set[str] = set()
        _raise_open_files()
        _, self._loop, ready = start_event_loop_in_daemon("grpo-door")
        ready.wait()
        try:
            runner, self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_S)
        except OSError as error:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise ValueError(
                f"agent_host is {host!r}, where no server can listen: {error}; leave it at 127.0.0.1, or write 0.0.0.0 "
                "for agents in containers"
            ) from error
        self.close = weakref.finalize(self, _close, runner, self._loop)
        """Closes connections and thread. Safe to call twice."""
        shown = host if host not in ANYWHERE else _own_address()
        self._base = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}"
        _keep_from_proxies(shown)

    def admit(self, episode: AgentEpisode) -> tuple[str, Door]:
        """Open an endpoint for this row's agent; returns a ticket for `dismiss`, and the endpoint."""
        ticket, key = secrets.token_hex(4), f"sk-{secrets.token_urlsafe(24)}"
        self._guests[ticket] = _Guest(key=key, episode=episode)
        return ticket, Door(url=f"{self._base}/{ticket}/v1", key=key, model=MODEL)

    def dismiss(self, ticket: str) -> None:
        """Close an endpoint: requests in progress are cancelled, later ones refused."""
        guest = self._guests.pop(ticket)
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in guest.asking])

    async def _listen(self) -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.add_routes(
            [
                web.post("/{ticket}/v1/chat/completions", self._guarded(self._chat)),
                web.post("/{ticket}/inference/v1/generate", self._guarded(self._generate)),
                web.post("/{ticket}/v1/inference/v1/generate", self._guarded(self._generate)),
                web.get("/{ticket}/v1/models", self._guarded(self._models)),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, self._host, 0, backlog=1024).start()
        return runner, runner.addresses[0][1]

    # -- requests -------------------------------------------------------------------------------------------------

    def _guarded(self, answer: Callable[[web.Request, AgentEpisode], Awaitable[web.StreamResponse]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            guest = self._guests.get(request.match_info["ticket"])
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if guest is None or not hmac.compare_digest(given.encode(errors="surrogateescape"), guest.key.encode()):
                raise RequestError(401, "invalid_api_key", "this key does not open this door: each row has its own")
            task = asyncio.current_task()
            assert task is not None
            guest.asking.add(task)
            try:
                return await answer(request, guest.episode)
            finally:
                guest.asking.discard(task)

        return handle

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            refusal = RequestError(413, "request_too_large", f"a body may have {MAX_BODY_BYTES >> 20} MiB")
        except web.HTTPException as error:
            refusal = RequestError(error.status, "not_found", f"{request.method} {request.path}: {error.reason}")
        except (ConnectionError, BatchOver) as error:
            refusal = RequestError(503, "shutting_down", str(error))
        except Exception as error:  # noqa: BLE001  an error of one request: the others go on
            _log.exception("a request of an agent failed", extra=FILE_ONLY)
            refusal = RequestError(500, "internal_error", f"{type(error).__name__}: {error}")
        response = web.json_response(refusal.body(), status=refusal.status)
        response.headers["x-should-retry"] = "false"  # OpenAI's clients respect it
        response.force_close()  # do not wait for a body that was not read
        return response

    async def _chat(self, request: web.Request, episode: AgentEpisode) -> web.StreamResponse:
        asked: ChatRequest = parse(ChatRequest, await _body(request, self._body_s))
        if asked.n not in (None, 1):
            raise RequestError(400, "unsupported_value", f"n is {asked.n}: ask for one answer at a time")
        self._warn_of_ignored(asked.ignored())
        tools = None if asked.tool_choice == "none" else asked.tools
        most = asked.max_completion_tokens or asked.max_tokens
        reply = await episode.chat(messages_of(asked), tools, max_tokens=most, stop=asked.stops)
        if not asked.stream:
            return web.json_response(chat_completion(reply))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for line in chat_chunks(reply, usage=asked.includes_usage):
            await response.write(line.encode())
        await response.write_eof()
        return response

    async def _generate(self, request: web.Request, episode: AgentEpisode) -> web.StreamResponse:
        asked: GenerateRequest = parse(GenerateRequest, await _body(request, self._body_s))
        if asked.stream:
            raise RequestError(400, "unsupported_value", "token ids are not streamed: leave stream out")
        if asked.sampling_params.get("n") not in (None, 1):
            raise RequestError(400, "unsupported_value", "n: ask for one answer at a time")
        self._warn_of_ignored(asked.ignored())
        reply: AgentReply = await episode.generate(asked.token_ids, max_tokens=asked.max_tokens, stop=asked.stops)
        return web.json_response(generated(reply, asked.request_id))

    async def _models(self, request: web.Request, episode: AgentEpisode) -> web.StreamResponse:
        return web.json_response(models())

    def _warn_of_ignored(self, names: list[str]) -> None:
        if new := [name for name in names if name not in self._ignored]:
            self._ignored.update(new)
            self._say(
                f"an agent sets {', '.join(new)}, which has no effect: it is sampled as the trainer's settings say, "
                "from the distribution that is trained"
            )


async def _body(request: web.Request, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise RequestError(408, "request_timeout", f"the body did not come within {timeout_s:g} s") from None


def _close(runner: web.AppRunner, loop: asyncio.AbstractEventLoop) -> None:
    async def close() -> None:
        with contextlib.suppress(Exception):
            await runner.cleanup()
        loop.stop()

    with contextlib.suppress(RuntimeError):  # the loop is closed
        asyncio.run_coroutine_threadsafe(close(), loop)


def _raise_open_files() -> None:
    """Raise the limit of open files as far as the system allows: each agent keeps a connection open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _own_address() -> str:
    """Address at which containers and other hosts reach this one: the address of the interface with the default
    route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737); nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _keep_from_proxies(host: str) -> None:
    """Exclude this host from proxies, for clients in this process and its children."""
    for name in ("NO_PROXY", "no_proxy"):
        known = [each for each in os.environ.get(name, "").split(",") if each]
        if "*" not in known:
            os.environ[name] = ",".join(dict.fromkeys([*known, "127.0.0.1", "localhost", host]))
