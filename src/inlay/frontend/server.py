"""What all endpoints of one frontend share, and what one call to it brings."""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import msgspec

from inlay.card import ModelCard
from inlay.digest import Secret
from inlay.embedding.cache import ResultCache
from inlay.errors import DeadlineExceededError
from inlay.frontend.bodies.admission import ByteBudget, Reservation
from inlay.frontend.bodies.base64_extractor import ExtractedBody
from inlay.frontend.bodies.body import Receive, Scope, Send, header, read_body
from inlay.frontend.bodies.embeds import EmbedsReader
from inlay.frontend.bodies.limits import EmbedsLimits
from inlay.frontend.bodies.memory import Room, private
from inlay.frontend.bodies.request_memory import RequestMemory
from inlay.frontend.callers.auth import ANYONE, Caller, Tenant
from inlay.frontend.callers.clients import Clients
from inlay.frontend.callers.keys import Keys
from inlay.frontend.metrics.cache import CacheMetrics
from inlay.frontend.metrics.engine import EngineMetrics
from inlay.frontend.metrics.frontend import Metrics, RequestTimes
from inlay.frontend.metrics.router import RouterMetrics
from inlay.frontend.metrics.store import StoreMetrics
from inlay.frontend.metrics.worker import WorkerMetrics
from inlay.frontend.renderers import Renderers
from inlay.frontend.request_scope import Deadline, Inflight
from inlay.frontend.settings import FrontendSettings
from inlay.frontend.tasks import check_task
from inlay.pace import mark_background
from inlay.request import Task
from inlay.router import Router, ServedModel
from inlay.store import LocalStoredPrompts, PromptStore, StoredPrompts
from inlay.telemetry import Span, Tracing

OFFLOAD_BYTES = 16 * 1024
"""Bytes of a body from which on it is parsed and prepared off the event loop.

Below, the change of thread costs more.
"""

P = ParamSpec("P")
R = TypeVar("R")

_encode = msgspec.json.Encoder().encode

JSON = (b"content-type", b"application/json")
"""The header of an answer in JSON."""


class Server:
    """One frontend: its settings and everything that lives as long as it does.

    Attributes:
        created: Unix time it came up; what `/v1/models` shows.
        store: of uploaded embeddings, or None; closed with this.
        secret: of the namespace.
        results: embeddings that were computed, and those that are.
        tracing: makes spans, or None; closed with this.
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
        self.created = int(time.time())
        self.keys = Keys(settings)
        self.clients = Clients(settings)
        self.budget = ByteBudget(settings.max_inflight_bytes)
        self.inflight = Inflight(settings.max_inflight_requests)
        self.metrics = Metrics(lambda: self.budget.used, lambda: self.inflight.count)
        self.engines = EngineMetrics(router.ready)
        self.metrics.registry.register(self.engines)
        self.metrics.registry.register(WorkerMetrics(router.ready, router.unavailable))
        self.metrics.registry.register(RouterMetrics(router))
        if self.store is not None:
            self.metrics.registry.register(StoreMetrics(self.store))
        self.results = ResultCache(settings.embedding_cache_bytes)
        self.metrics.registry.register(CacheMetrics(self.results))
        self.limits = EmbedsLimits(settings, router.models)
        self.embeds = EmbedsReader(settings.enable_prompt_embeds, self.limits, secret, self.metrics)
        self.renderers = Renderers(settings.chat_template)
        self._pool = ThreadPoolExecutor(
            min(4, os.cpu_count() or 1),
            thread_name_prefix="inlay-prepare",
            initializer=mark_background,
        )

    def card(self, model: str | None) -> ModelCard:
        """The card of the model asked for, or of the adapter's. Raises as `Router.card`."""
        return self.model(model).card

    def model(self, name: str | None, *tasks: Task) -> ServedModel:
        """The model or the adapter asked for; the first model that fits when none is named.

        Args:
            name: as the request has it.
            tasks: of which it must do one; any does where none is given.

        Raises:
            InvalidRequestError: it does none of them.
            InlayError: as `Router.card`.
        """
        if name is not None:
            found = self.router.model(name)
        else:
            cards = self.router.models()
            if not cards:
                raise self.router.unready()
            found = ServedModel(
                next((card for card in cards if set(tasks) & set(card.tasks)), cards[0])
            )
        if tasks:
            check_task(found.card, *tasks)
        return found

    async def awake(self, name: str) -> None:
        """Wait until a model is awake, where requests are to wait for that.

        Raises `NotFoundError`.
        """
        if self.settings.asleep_requests == "wait":
            await self.router.wait_awake(name)

    def room(self, num_bytes: int) -> memoryview:
        """Writable memory for a tensor file of `num_bytes`, from which the worker reads it where it lies, as long as there is some."""
        shared = self.router.room(num_bytes) if num_bytes >= OFFLOAD_BYTES else None
        return private(num_bytes) if shared is None else shared

    async def prepare(
        self, size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `request`, CPU work on a request of `size` bytes, where it does not hold up others."""
        if size < OFFLOAD_BYTES:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(work, *args, **kwargs))

    def close(self) -> None:
        """Stop the threads once they have done what they are at."""
        self._pool.shutdown(wait=False)
        if self.store is not None:
            self.store.close()
        if self.tracing is not None:
            self.tracing.close()


@dataclass(slots=True)
class Call:
    """One request being answered.

    Attributes:
        caller: who asks, once that has been checked.
        reservation: the bytes it holds.
        timeout: seconds it may take in all, or None.
        began: `time.perf_counter` when it came.
        clock: ends the call when its time is up, until `take_clock`.
        body_read: nothing of the body is left on the connection.
        quiet: it is of no interest to those who read logs: a probe, or the metrics.
        times: what is counted of it, once that has begun.
        sent: `time.perf_counter` when its requests were sent.
        span: of the request, where spans are made.
        failed: what ended its stream after the answer had begun.
    """

    server: Server
    scope: Scope
    receive: Receive
    send: Send
    request_id: str
    reservation: Reservation
    caller: Caller = ANYONE
    timeout: float | None = None
    began: float = field(default_factory=time.perf_counter)
    body_read: bool = False
    clock: asyncio.Timeout | None = None
    quiet: bool = False
    times: RequestTimes | None = None
    sent: float | None = None
    span: Span | None = None
    failed: BaseException | None = None
    _intake: RequestMemory | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name, in lower case, if there is one."""
        return header(self.scope["headers"], name)

    async def body(self, room: Room = private) -> ExtractedBody:
        """The whole body; arguments and errors as `inlay.frontend.bodies.body.read_body`."""
        body = await read_body(
            self.scope,
            self.receive,
            self.server.settings,
            self.reservation,
            self.server.limits,
            room,
        )
        self.body_read = True
        self.server.metrics.body_read(self.scope.get("inlay.route", "other"), len(body))
        return body

    @property
    def memory(self) -> RequestMemory:
        """Counts what becomes of the body, once it has been read."""
        if self._intake is None:
            self._intake = RequestMemory(self.reservation, self.server.limits)
        return self._intake

    @property
    def tenant(self) -> Tenant:
        """Whose data the request's is."""
        return self.caller.tenant

    @property
    def client(self) -> str | None:
        """Who takes turns with the others, once that is known."""
        return None if self.reservation.client is None else self.reservation.client.name

    @property
    def remaining(self) -> float | None:
        """Seconds the request may still take, or None.

        Raises `DeadlineExceededError` when there are none.
        """
        if self.timeout is None:
            return None
        left = self.timeout - (time.perf_counter() - self.began)
        if left <= 0:
            raise self.too_late()
        return left

    def too_late(self) -> DeadlineExceededError:
        """The error of a request whose time is up."""
        return DeadlineExceededError(f"the request took longer than its {self.timeout or 0:g} s")

    def take_clock(self) -> "Deadline | None":
        """When the call must end and with what. Whoever takes it sees to it from now on."""
        left = self.remaining
        if left is None:
            return None
        if self.clock is not None:
            self.clock.reschedule(None)
        return Deadline(left, self.too_late())

    @property
    def path_params(self) -> dict[str, Any]:
        """What the route's path took from the URL."""
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    async def json(self, answer: msgspec.Struct | dict[str, Any], status: int = 200) -> None:
        """Answer with `answer` as JSON."""
        await self.bytes(_encode(answer), JSON, status)

    async def prepared_json(self, size: int, make: Callable[[], msgspec.Struct]) -> None:
        """Answer with what `make` returns, as JSON.

        Work on `size` bytes, done where it does not hold up others.
        """
        await self.bytes(await self.server.prepare(size, lambda: _encode(make())), JSON)

    async def bytes(
        self,
        body: bytes,
        media: tuple[bytes, bytes],
        status: int = 200,
        more: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Answer with `body`, and `more` headers."""
        length = (b"content-length", str(len(body)).encode())
        headers = [media, length, *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
