"""Lines of a batch, answered by the same functions as requests over HTTP, and as background work.

A line is a `Call` of its owner that no connection stands behind. It does not count in the owner's
rate or running requests, and its bytes count in a budget of batches alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.http.app import Handler, Routes
from inlay.http.asgi import Message
from inlay.http.bodies.accounting import ByteBudget, RequestMemory, Reservation
from inlay.http.callers.auth import Caller
from inlay.http.callers.clients import Client
from inlay.http.callers.keys import ClientLimits
from inlay.http.errors import error_json, internal_error
from inlay.http.inner_call import inner_call
from inlay.http.openapi import Operation
from inlay.http.parsed_request import parse_body
from inlay.http.server import Server, preparing_for
from inlay.messages.request import Task
from inlay_batches.files import Files
from inlay_batches.lines import LineRequest, Outcome, answered, seed_of, usage_of, with_seed
from inlay_batches.matrix import row_of, with_base64
from inlay_batches.records import BatchRecord

T = TypeVar("T")

_log = logging.getLogger(__name__)

ENDPOINTS: dict[str, tuple[Task, ...]] = {
    "/v1/chat/completions": (Task.GENERATE,),
    "/v1/completions": (Task.GENERATE,),
    "/v1/responses": (Task.GENERATE,),
    "/v1/embeddings": (Task.EMBED,),
    "/v1/score": (Task.EMBED, Task.SCORE),
    "/score": (Task.EMBED, Task.SCORE),
    "/v1/rerank": (Task.EMBED, Task.SCORE),
    "/rerank": (Task.EMBED, Task.SCORE),
    "/pooling": (Task.EMBED, Task.SCORE),
    "/classify": (Task.SCORE,),
    "/v1/encode": (Task.ENCODE,),
}
"""Routes that lines may ask, and the tasks of their models."""

TRIES = 3
"""Times that a line is sent which fails by the server's doing, and not for lack of room.

Each is as many attempts of the router's; all but the first are one line's at a time.
"""

_WAIT_SECONDS = 1.0
_MOST_SECONDS = 30.0
_TRY_AGAIN = frozenset({429, 503})


_HOLD_SECONDS = 600.0


class _Seed(msgspec.Struct):
    seed: int | None = None


class LineRoute(NamedTuple):
    """A route that lines ask.

    Attributes:
        path: of the route.
        handler: answers.
        decoder: of its request.
        seeded: its requests have a seed.
    """

    path: str
    handler: Handler
    decoder: msgspec.json.Decoder[Any]
    seeded: bool


def endpoints_of(routes: Routes) -> dict[str, LineRoute]:
    """Return the routes of a server that lines may ask, by path."""

    def one(operation: Operation, handler: Handler) -> LineRoute:
        kind: Any = operation.request
        decoder = msgspec.json.Decoder(kind)
        return LineRoute(operation.path, handler, decoder, "seed" in kind.__struct_fields__)

    return {
        operation.path: one(operation, handler)
        for operation, handler in routes
        if operation.method == "POST" and operation.path in ENDPOINTS
    }


class _CapturedAnswer:
    """Answer of a handler."""

    def __init__(self) -> None:
        self.status = 500
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.body += message.get("body", b"")


class ServerWork:
    """`Work` of one batch.

    Args:
        server: answers.
        endpoint: that the lines ask.
        record: of the batch.
        owner: digest of its tenant.
        caller_of: returns the tenant's caller, or None where it has no key any more.
        files: where its outputs go.
        budget: memory of all lines.
        max_lines: of a batch.
    """

    def __init__(
        self,
        server: Server,
        endpoint: LineRoute,
        record: BatchRecord,
        owner: str,
        caller_of: Callable[[str], Caller | None],
        files: Files,
        budget: ByteBudget,
        max_lines: int,
    ) -> None:
        self._server = server
        self._endpoint = endpoint
        self._record = record
        self._owner = owner
        self._caller_of = caller_of
        self._files = files
        self._budget = budget
        self._client = Client(server.clients, f"{owner}/batch", ClientLimits())
        self._held_until = 0.0
        self._failed_before = asyncio.Lock()
        self.max_lines = max_lines
        self.max_line_bytes = server.settings.max_body_bytes

    def is_allowed(self) -> bool:
        return self._caller_of(self._owner) is not None

    def check(self, body: bytes) -> str | None:
        memory = Reservation(self._budget)
        memory.client = self._client
        limits = self._server.limits
        with memory:
            parsed = parse_body(
                body,
                self._endpoint.decoder,
                lambda _: (),
                limits=lambda: limits.any,
                intake=RequestMemory(memory, limits),
            ).request
        if getattr(parsed, "stream", None):
            raise InvalidRequestError("a line of a batch cannot be streamed", param="stream")
        if getattr(parsed, "texts", None) is not None:
            raise InvalidRequestError(
                "texts are answered with a list, which has no usage: a line of a batch gives "
                "documents",
                param="texts",
            )
        model: str | None = parsed.model
        return model

    async def check_model(self, name: str | None) -> None:
        self._server.model(name, *ENDPOINTS[self._endpoint.path])

    async def answer(self, number: int, request: LineRequest) -> Outcome:
        body = request.body
        matrix = self._record.output_format != "jsonl"
        if matrix:
            body = with_base64(body)
        if self._endpoint.seeded:
            body = await self.prepare(len(body), partial(self._seeded, request))
        tries, wait = 0, _WAIT_SECONDS
        while True:
            request_id = f"{self._record.id}-{number}"
            # One of those that have failed may be what ends workers, and all that run beside it.
            async with self._failed_before if tries else nullcontext():
                status, text, tried, retry = await self._ask(body, request_id)
            if status in _TRY_AGAIN and not tried:
                # No room yet. Others were first, or no worker is there.
                await asyncio.sleep(retry or wait)
                wait = min(2 * wait, _MOST_SECONDS)
                continue
            tries += 1
            if matrix and status == 200:
                read = partial(self._in_matrix, number, request, request_id, text)
                return await self.prepare(len(text), read)
            if (status < 500 and status != 429) or tries >= TRIES:
                read = partial(self._answered, number, request, status, request_id, text)
                return await self.prepare(len(text), read)
            await asyncio.sleep(_WAIT_SECONDS)

    def _in_matrix(
        self, number: int, request: LineRequest, request_id: str, text: bytes
    ) -> Outcome:
        row = row_of(text)
        if row is None:
            error = InvalidRequestError(
                "a line of a batch whose output is a matrix has one input", param="input"
            )
            status, text, vector = error.status, error_json(error), b""
        else:
            status, text, vector = 200, row.body, row.vector
        outcome = self._answered(number, request, status, request_id, text)
        return outcome._replace(vector=vector)

    def _answered(
        self, number: int, request: LineRequest, status: int, request_id: str, text: bytes
    ) -> Outcome:
        id_, usage = self._record.id, usage_of(text)
        return answered(id_, number, request.custom_id, status, request_id, text, usage)

    def _seeded(self, request: LineRequest) -> bytes:
        seed = msgspec.json.decode(request.body, type=_Seed).seed
        if seed is not None and seed != -1:
            return request.body
        return with_seed(request.body, seed_of(self._record.id, request.custom_id))

    async def _ask(self, body: bytes, request_id: str) -> tuple[int, bytes, bool, float | None]:
        """Return (status, body, whether a worker tried, `Retry-After`) of the route's answer."""
        caller = self._caller_of(self._owner)
        if caller is None:
            # Its batch is cancelled within seconds.
            await asyncio.Event().wait()
            raise AssertionError
        answer = _CapturedAnswer()
        call = inner_call(
            self._server,
            self._endpoint.path,
            body,
            answer.send,
            request_id=request_id,
            caller=caller,
            client=self._client,
            budget=self._budget,
            background=True,
        )
        preparing_for.set(call.reservation)
        with call.reservation, call.ending:
            try:
                await self._endpoint.handler(call)
            except InlayError as error:
                text = error_json(error, call.errors, request_id)
                return error.status, text, error.reason is not None, error.retry_after
            except Exception:
                _log.exception("line %s of a batch failed", request_id)
                return 500, error_json(internal_error(request_id)), True, None
        return answer.status, bytes(answer.body), True, None

    async def hold(self, refs: Sequence[str]) -> None:
        """As `Work.hold`: each is used now, often enough that none expires."""
        store, caller, now = self._server.store, self._caller_of(self._owner), time.monotonic()
        if store is None or caller is None or now < self._held_until:
            return
        least = _HOLD_SECONDS
        for ref in refs:
            # One that is not there is the error of the lines that name it.
            with suppress(NotFoundError):
                stored = await store.touch(caller.tenant.id, ref)
                if stored.expires_at is not None:
                    least = min(least, (stored.expires_at - time.time()) / 3)
        self._held_until = now + least

    async def has_room(self, num_bytes: int) -> bool:
        return await self._files.has_room(self._owner, num_bytes)

    async def prepare(self, size: int, work: Callable[[], T], /) -> T:
        memory = Reservation(self._budget)
        memory.client = self._client
        preparing_for.set(memory)
        return await self._server.run_prepared(size, work)

    async def publish(self, record: BatchRecord) -> None:
        await self._files.publish(self._owner, record)
