"""`Server`, the state all endpoints share, and `Call`, one HTTP request."""

import asyncio
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar
from urllib.parse import parse_qs

import msgspec
from prometheus_client.core import Metric

from inlay.base.errors import DeadlineExceededError, InvalidRequestError
from inlay.base.pace import lending, mark_background, while_wanted
from inlay.base.single_flight import Paced
from inlay.base.slots import Slots
from inlay.embedding.cache import ResultCache
from inlay.embedding.joining import Joining
from inlay.http.asgi import Headers, Receive, Scope, Send
from inlay.http.bodies.accounting import ByteBudget, EmbedsLimits, RequestMemory, Reservation
from inlay.http.bodies.connection import Exchange
from inlay.http.bodies.embeds import EmbedsReader
from inlay.http.bodies.memory import private
from inlay.http.callers.auth import ANYONE, ApiKeys, Caller
from inlay.http.callers.clients import Clients
from inlay.http.errors import OPENAI, ErrorForm
from inlay.http.metrics.collectors import (
    Collected,
    cache_metrics,
    router_metrics,
    store_metrics,
    worker_metrics,
)
from inlay.http.metrics.engine import PACE, EngineMetrics
from inlay.http.metrics.requests import Metrics, RequestTimes
from inlay.http.request_scope import Deadline, Inflight
from inlay.http.settings import FrontendSettings
from inlay.http.tables import Tables
from inlay.http.tasks import wrong_task
from inlay.media.fetch import Fetcher
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret
from inlay.messages.priority import BACKGROUND
from inlay.messages.prompt import Prompt
from inlay.messages.request import Input, Params, Request, Task
from inlay.render.renderer import Renderers
from inlay.router import Router, ServedModel
from inlay.store import LocalStoredPrompts, PromptStore, StoredPrompts
from inlay.telemetry import Span, Tracing

OFFLOAD_BYTES = 16 * 1024
"""Bytes of a body from which it is parsed and prepared off the event loop.

For smaller bodies the change of thread costs more than it saves.
"""

LONG_BYTES = 1024 * 1024
"""Bytes of a body, samples of a sound, from which work may take a second: one thread does none."""

SMALL_BYTES = 1024
"""Bytes of a body below which it is prepared on the event loop in any case."""

INLINE = 0.002
"""Seconds of such work by which the event loop may be ahead of its share, half of its time.

Beyond them no body but a small one is prepared there: 14 KB of text are 6 ms.
"""

preparing_for: ContextVar[Reservation | None] = ContextVar("preparing_for", default=None)
"""Memory of the request that the running task answers."""

_QUERY_FIELDS = 16

P = ParamSpec("P")
R = TypeVar("R")

_encode = msgspec.json.Encoder().encode

JSON = "application/json"
OCTETS = "application/octet-stream"
IMAGES = "image/"
"""Beginning of the media types of images."""
JSON_HEADER = (b"content-type", b"application/json")
"""Header of a response in JSON."""

TIMEOUT_HEADER = b"x-request-timeout"


class Server:
    """One frontend: its settings and all objects of its lifetime.

    Attributes:
        created: Unix time of the start, shown by `/v1/models`.
        store: store of uploaded embeddings, or None; closed with the server.
        secret: of the namespace.
        fetcher: fetches media by URL.
        exposition: all metrics in Prometheus' text format.
        results: cache of computed embeddings, with those being computed.
        joining: joins background requests for vectors.
        tracing: makes spans, or None; closed with the server.
        parts: `http.frontend_part.FrontendPart` of extensions, by the extension's name.
    """

    def __init__(
        self,
        router: Router,
        settings: FrontendSettings,
        secret: Secret,
        store: PromptStore | StoredPrompts | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.router = router
        self.settings = settings
        self.store = LocalStoredPrompts(store) if isinstance(store, PromptStore) else store
        self.secret = secret
        self.tracing = tracing
        self.parts: dict[str, Any] = {}
        self.created = int(time.time())
        self.keys = ApiKeys(settings)
        self.clients = Clients(settings)
        self.budget = ByteBudget(settings.max_inflight_bytes)
        self.inflight = Inflight(settings.max_inflight_requests)
        self.metrics = Metrics(lambda: self.budget.used, lambda: self.inflight.count)
        self.engines = EngineMetrics(router.ready)
        self.results = ResultCache(settings.embedding_cache_bytes)
        self.joining = Joining()
        self.metrics.registry.register(self.engines)
        self.exposition = Paced(self._exposed, PACE)
        self.show_metrics(lambda: worker_metrics(router.ready(), router.unavailable()))
        self.show_metrics(lambda: router_metrics(router))
        self.show_metrics(lambda: cache_metrics(self.results))
        if (shown := self.store) is not None:
            self.show_metrics(lambda: store_metrics(shown))
        self.limits = EmbedsLimits(settings, router.models)
        self.embeds = EmbedsReader(settings.enable_prompt_embeds, self.limits, secret, self.metrics)
        self.fetcher = Fetcher(settings.fetching)
        self.renderers = Renderers(settings.chat_template, router.paths)
        self.tables = Tables(router.paths)
        # One client alone has half of them, and whoever comes next finds one at once.
        threads = 2 * min(4, os.cpu_count() or 1)
        self._turns = Slots(threads)
        # What is long leaves one to what is short, however many clients send it.
        self._long_turns = Slots(threads - 1)
        self._inline_until = 0.0
        self._pool = ThreadPoolExecutor(
            threads,
            thread_name_prefix="inlay-prepare",
            initializer=mark_background,
        )

    def show_metrics(self, metrics: Callable[[], Iterator[Metric]]) -> None:
        """Have `/metrics` show what a function yields."""
        self.metrics.registry.register(Collected(metrics))

    async def _exposed(self) -> bytes:
        await self.engines.refresh()
        return self.metrics.exposition()

    def card(self, model: str | None) -> ModelCard:
        """Return the card of a model, or of an adapter's model. Raises as `Router.card`."""
        return self.model(model).card

    def model(self, name: str | None, *tasks: Task) -> ServedModel:
        """Return the named model or adapter; without a name, the first model that fits.

        Args:
            name: `model` of the request.
            tasks: the model must do one of them; no tasks means any model.

        Raises:
            InvalidRequestError: it does none of the tasks.
            InlayError: as `Router.card`.
        """
        if name is not None:
            find = self.router.choose if tasks else self.router.model
            found = find(name, *tasks[:1])
        else:
            cards = [card for card in self.router.models() if not card.is_inner]
            if not cards:
                raise self.router.unready()
            found = ServedModel(
                next((card for card in cards if set(tasks) & set(card.tasks)), cards[0])
            )
        if tasks and not set(tasks) & set(found.card.tasks):
            raise wrong_task(found.card, *tasks)
        return found

    def check_awake(self, name: str, task: Task | None = None) -> None:
        """Raise as `Router.check_awake`, unless the settings say that requests wait."""
        if self.settings.asleep_requests != "wait":
            self.router.check_awake(name, task)

    async def awake(self, name: str, task: Task | None = None) -> None:
        """Wait until a model has workers, and they are awake, if the settings say to wait.

        With a `task`, those that do this.

        Raises `NotFoundError`.
        """
        await self.router.wait_worker(name, task)
        if self.settings.asleep_requests == "wait":
            await self.router.wait_awake(name, task)

    def room(self, num_bytes: int) -> memoryview:
        """Return writable memory for a tensor file, shared with the worker while there is room."""
        shared = self.router.room(num_bytes) if num_bytes >= OFFLOAD_BYTES else None
        return private(num_bytes) if shared is None else shared

    async def run_prepared(
        self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `function`, CPU work on `size` bytes of a request, in a thread if it is large.

        Or if it is not small and the event loop has done much. Clients take turns at the threads,
        of which one is left to what is shorter than `LONG_BYTES`.
        What nobody waits for any more ends at its next `yield_gil`.
        """
        if size < SMALL_BYTES:
            return function(*args, **kwargs)
        now = time.perf_counter()
        if size < OFFLOAD_BYTES and self._inline_until - now < INLINE:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - begun
                self._inline_until = max(self._inline_until, now) + 2 * took
        memory = preparing_for.get()
        client = None if memory is None or memory.client is None else memory.client.name
        async with AsyncExitStack() as held:
            turns = (self._long_turns, self._turns) if size >= LONG_BYTES else (self._turns,)
            places = [await held.enter_async_context(each.taken(client)) for each in turns]
            run = asyncio.get_running_loop().run_in_executor
            left = threading.Event()
            wanted = functools.partial(while_wanted, left, function)
            if memory is not None:
                wanted = functools.partial(lending, memory.lend, wanted)
            work = run(self._pool, functools.partial(wanted, *args, **kwargs))
            for place in places:
                place.occupy(work)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                left.set()
                raise
            finally:
                if work.done():
                    # With its error it would hold this frame, and all that the request took.
                    for place in places:
                        place.pending.clear()
                del work

    def close(self) -> None:
        """Stop the threads after their current tasks, and close the store and the tracing."""
        self._pool.shutdown(wait=False)
        self.fetcher.close()
        self.tables.close()
        if self.store is not None:
            self.store.close()
        if self.tracing is not None:
            self.tracing.close()


@dataclass(slots=True)
class Call:
    """One HTTP request that is being answered.

    Attributes:
        caller: the caller, once authenticated.
        reservation: the bytes it holds.
        memory: accounting of them, once the body has been read.
        headers: of the request.
        declared: its `Content-Length`; None if the body is chunked.
        exchange: its connection, if the HTTP server is this one.
        added: headers of its answer, whatever that is.
        route: path of its route as the description has it, once that is known.
        background: its engine requests give way to all others.
        timeout: seconds it may take in all, or None.
        began: `time.perf_counter` at its arrival.
        clock: ends the call when its time is up, until `detach_deadline`.
        body_read: True if nothing of the body is left on the connection.
        quiet: True for probes and metrics, which are logged at level DEBUG.
        times: its measurements, once they have begun.
        sent: `time.perf_counter` when its engine requests were sent.
        span: span of the request, if spans are made.
        failed: error that ended its stream after the answer had begun.
        errors: form of its errors, once its route is known.
        ending: is closed when the call ends.
    """

    server: Server
    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    reservation: Reservation
    headers: Headers = field(default_factory=dict)
    added: list[tuple[bytes, bytes]] = field(default_factory=list)
    declared: int | None = None
    exchange: Exchange | None = None
    route: str = "other"
    caller: Caller = ANYONE
    background: bool = False
    timeout: float | None = None
    began: float = field(default_factory=time.perf_counter)
    body_read: bool = False
    clock: asyncio.Timeout | None = None
    quiet: bool = False
    times: RequestTimes | None = None
    sent: float | None = None
    span: Span | None = None
    failed: BaseException | None = None
    errors: ErrorForm = OPENAI
    ending: ExitStack = field(default_factory=ExitStack)
    memory: RequestMemory = field(init=False)

    def answers_with(self, errors: ErrorForm) -> None:
        """Set the form of errors, and the header that has the request id in that API."""
        self.errors = errors
        if errors.id_header is not None:
            self.added.append((errors.id_header, self.request_id.encode()))

    @property
    def client(self) -> str | None:
        """Name of the client for fair scheduling, once it is known."""
        return None if self.reservation.client is None else self.reservation.client.name

    def reserve(self, size: int) -> None:
        """Reserve memory of the caller's, also of a GET, which counts in no other quota.

        Raises as `Reservation.grow`.
        """
        if self.reservation.client is None:
            peer = self.scope.get("client")
            self.reservation.client = self.server.clients.of(self.caller, peer[0] if peer else "")
            preparing_for.set(self.reservation)
        self.reservation.grow(size)

    def start_clock(self) -> asyncio.Timeout:
        """Return the clock that ends the call: the client's time, bounded by the server's.

        Raises:
            InvalidRequestError: the header is not a number of seconds.
            DeadlineExceededError: the time is up.
        """
        self.timeout = self.server.settings.request_timeout
        value = self.headers.get(TIMEOUT_HEADER)
        if value is not None:
            try:
                asked = float(value)
            except ValueError:
                asked = math.nan
            if not (0 < asked < math.inf):
                raise InvalidRequestError(
                    "X-Request-Timeout must be a number of seconds, more than 0, got "
                    f"{value[:40].decode('latin-1')!r}",
                    param="X-Request-Timeout",
                )
            self.timeout = asked if self.timeout is None else min(asked, self.timeout)
        self.clock = asyncio.timeout(self.remaining)
        return self.clock

    @property
    def remaining(self) -> float | None:
        """Remaining seconds of the request, or None.

        Raises `DeadlineExceededError` if there are none.
        """
        if self.timeout is None:
            return None
        left = self.timeout - (time.perf_counter() - self.began)
        if left <= 0:
            raise self.too_late()
        return left

    def engine_request(
        self,
        id_: str,
        params: Params,
        prompts: tuple[Prompt, ...] = (),
        *,
        task: Task = Task.GENERATE,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
        inputs: tuple[Input, ...] = (),
    ) -> Request:
        """Return a request to an engine for this call. Raises as `remaining`.

        Args:
            id_: of the request; two of one server must differ.
            params: of the task.
            prompts: as many as the task takes.
            task: that is to be done.
            adapter: name of the adapter, or None.
            cache_salt: the client's own.
            priority: lower is sooner; 0 if None.
            inputs: of a stage.
        """
        client = self.reservation.client
        return Request(
            id=id_,
            task=task,
            prompts=prompts,
            params=params,
            adapter=adapter,
            salt=self.caller.tenant.salted(cache_salt),
            deadline=self.remaining,
            priority=BACKGROUND if self.background else priority or 0,
            trace=None if self.span is None else self.span.traceparent,
            client=None if client is None else client.name,
            inputs=inputs,
        )

    def too_late(self) -> DeadlineExceededError:
        """Return the error of a request whose time is up."""
        return DeadlineExceededError(f"the request took longer than its {self.timeout or 0:g} s")

    def detach_deadline(self) -> "Deadline | None":
        """Return the deadline and stop the call's own clock; the caller enforces it from now on."""
        left = self.remaining
        if left is None:
            return None
        if self.clock is not None:
            self.clock.reschedule(None)
        return Deadline(left, self.too_late())

    def query(self) -> dict[str, list[str]]:
        """Return the values of the query's parameters.

        Routes ignore those that they do not know: clients add some for other servers.

        Raises:
            InvalidRequestError: the query cannot be parsed.
        """
        query: bytes = self.scope.get("query_string", b"")
        try:
            return parse_qs(query.decode("latin-1"), max_num_fields=_QUERY_FIELDS)
        except ValueError as error:
            raise InvalidRequestError(
                f"the query cannot be read: {error}", param="query"
            ) from error

    @property
    def path_params(self) -> dict[str, Any]:
        """Parameters of the route's path."""
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    async def json(self, answer: msgspec.Struct | dict[str, Any], status: int = 200) -> None:
        await self.bytes(_encode(answer), JSON_HEADER, status)

    async def prepared_json(
        self, size: int, make: Callable[[], msgspec.Struct | dict[str, Any]]
    ) -> None:
        """Answer with the result of `make` as JSON, made in a thread if `size` bytes are many."""
        await self.bytes(await self.server.run_prepared(size, lambda: _encode(make())), JSON_HEADER)

    async def bytes(
        self,
        body: bytes,
        media: tuple[bytes, bytes],
        status: int = 200,
        more: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Answer with `body` and the headers `more`."""
        length = (b"content-length", str(len(body)).encode())
        headers = [media, length, *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
