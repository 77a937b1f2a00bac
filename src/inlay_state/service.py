"""The part of a frontend that keeps responses and conversations."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from prometheus_client.core import GaugeMetricFamily, Metric

from inlay.api.generation.chat import chat_model
from inlay.api.openai.responses.input import check_responses
from inlay.api.openai.responses.route import answer, opening_of
from inlay.api.openai.schema.responses import Response, ResponsesRequest
from inlay.base.errors import InvalidRequestError, NotFoundError, RateLimitedError
from inlay.http.callers.auth import Caller
from inlay.http.frontend_part import FrontendAccess
from inlay.http.metrics.collectors import Collected
from inlay.http.parsed_request import ParsedRequest
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call
from inlay.http.sse import NAMED, EventStream
from inlay.store.kept.contents import PIECES_HELD
from inlay.store.kept.lease import replace
from inlay.store.kept.place import KeptPlace
from inlay.store.kept.rounds import rounds
from inlay_state import conversations
from inlay_state.events import framed, lines_in
from inlay_state.history import History, history_of, reserve, with_history
from inlay_state.items import check_items, encoded, items_of
from inlay_state.jobs import Jobs, keeping_of
from inlay_state.kept import Kept
from inlay_state.records import (
    ResponseRecord,
    new_id,
)

KIND = "responses"
"""Name of the storage in a fleet."""

SCAN_SECONDS = 3.0
SWEEP_SECONDS = 60.0
ORPHAN_SECONDS = 3600.0
POLL_SECONDS = 0.25
SPARE_BYTES = 32 * 1024 * 1024
"""Room in memory for what takes the place of something: `Kept` counts only what it adds."""

_FLAG = "--response-store"


def make(access: FrontendAccess) -> "State | None":
    """Return the part of a frontend; None where it is off.

    Raises:
        InvalidRequestError: the settings cannot be.
    """
    return None if access.responses.response_store == "off" else State(access)


class State:
    """`FrontendPart` and `ResponseKeeper`.

    Attributes:
        kept: all records, once it has started.
        jobs: background responses that it makes.
    """

    kept: Kept
    jobs: Jobs

    def __init__(self, access: FrontendAccess) -> None:
        self._settings = settings = access.responses
        self._server = access.server
        self._place = KeptPlace(
            settings.response_store,
            _FLAG,
            KIND,
            max_bytes=settings.response_store_bytes,
            spare=SPARE_BYTES,
            key_file=settings.response_store_key_file,
            open_shared=access.open_shared,
        )
        _check_apart(settings.response_store, access.batches.batch_store)
        self._owner_key = blake3(b"response owners", key=access.server.secret.store).digest()
        self._queued = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        access.server.metrics.registry.register(Collected(self._metrics))

    async def start(self) -> None:
        """Open the storage, and run what is to be run. Raises as the storage."""
        settings, total = self._settings, self._place.max_bytes
        self.kept = Kept(
            *await self._place.open(),
            max_bytes=total,
            owner_bytes=settings.responses_tenant_bytes or total,
            ttl=settings.response_ttl,
        )
        self.jobs = Jobs(self._server, self.kept, self._caller_of)
        self._tasks = [
            asyncio.create_task(rounds(self.jobs.scan, SCAN_SECONDS, self._queued)),
            asyncio.create_task(rounds(self._sweep, SWEEP_SECONDS)),
        ]

    async def close(self) -> None:
        """Let others take its background responses, which go on where they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.jobs.close()
        self._place.close()

    def owner_of(self, call: Call) -> str:
        """Return the digest of a caller's tenant, by which its records are found."""
        return self._digest(call.caller.tenant.id)

    def _digest(self, tenant: str) -> str:
        return blake3(tenant.encode(), key=self._owner_key).hexdigest(16)

    def _caller_of(self, owner: str) -> Caller | None:
        callers = self._server.keys.callers()
        return next((one for id_, one in callers.items() if self._digest(id_) == owner), None)

    # What clients ask.

    async def create(self, call: Call, incoming: ParsedRequest[ResponsesRequest]) -> None:
        """Answer a request; keep the response unless it says not to.

        Raises:
            InvalidRequestError: what it goes on with does not exist, or fields exclude each other.
            InlayError: as `answer`, and as `Kept.write`.
        """
        request = incoming.parsed.request
        stored = _is_stored(request, incoming)
        conversation_id = _conversation_of(request)
        owner = self.owner_of(call)
        if not stored and conversation_id is None and request.previous_response_id is None:
            await answer(call, incoming)
            return
        if stored:
            self.kept.check_room(owner, incoming.size)
        await call.server.run_prepared(call.memory.json, check_responses, request)
        id_ = new_id("resp_")
        previous = request.previous_response_id
        async with AsyncExitStack() as held:
            if conversation_id is not None and not request.background:
                await held.enter_async_context(
                    conversations.locked(self.kept, owner, conversation_id, id_)
                )
            history = await history_of(call, self.kept, owner, previous, conversation_id)
            record = ResponseRecord(
                id=id_,
                created_at=int(self.kept.now()),
                expires_at=self.kept.expiry(),
                status="queued",
                background=bool(request.background),
                previous=previous,
                conversation=conversation_id,
                session=history.session or id_,
            )
            if request.background:
                await self._enqueue(call, incoming, record, history)
            else:
                await self._answer(call, incoming, record, history, stored=stored)

    async def whole(
        self, call: Call, incoming: ParsedRequest[ResponsesRequest]
    ) -> ParsedRequest[ResponsesRequest]:
        """Return a request with what it goes on with. Raises as `create`."""
        request = incoming.parsed.request
        past = request.previous_response_id, _conversation_of(request)
        history = await history_of(call, self.kept, self.owner_of(call), *past)
        return await with_history(call, incoming, history)

    async def _answer(
        self,
        call: Call,
        incoming: ParsedRequest[ResponsesRequest],
        record: ResponseRecord,
        history: History,
        *,
        stored: bool,
    ) -> None:
        """Answer a request whose client waits; its conversation is locked."""
        owner, conversation_id = self.owner_of(call), record.conversation
        own = bytearray()
        if stored or conversation_id is not None:
            own = await _encoded_input(call, incoming, record.id)

        async def keep(response: Response) -> None:
            if stored:
                body = msgspec.json.encode(response)
                ended = replace(
                    record,
                    status=response.status,
                    input=await self.kept.write(owner, "input", own),
                    output=await self.kept.write(owner, "output", body),
                )
                await self.kept.add(owner, ended)
            if conversation_id is not None:
                await conversations.complete(
                    call, self.kept, owner, conversation_id, record.id, own, response
                )

        keeping = keeping_of(record, keep, store=stored)
        await answer(call, await with_history(call, incoming, history), keeping)

    async def _enqueue(
        self,
        call: Call,
        incoming: ParsedRequest[ResponsesRequest],
        record: ResponseRecord,
        history: History,
    ) -> None:
        """Keep a background response, and answer that it is queued, or with its events."""
        request, owner = incoming.parsed.request, self.owner_of(call)
        prepared = call.server.run_prepared

        def check() -> None:
            check_items([*history.items, *items_of(request.input, record.id)])

        await prepared(call.memory.json + history.size, check)
        model = chat_model(call.server, request.model)
        active = sum(one == owner for one, _, _ in await self.kept.jobs())
        if active >= self._settings.max_background_responses:
            raise RateLimitedError(
                f"you have {active} background responses under way, which is the limit "
                "(--max-background-responses)",
                retry_after=5,
            )
        streams, request.stream = bool(request.stream), True
        if request.seed is None or request.seed == -1:
            request.seed = secrets.randbits(31)  # made again, it has the same text
        temperature = 1.0 if request.temperature is None else request.temperature
        top_p = 1.0 if request.top_p is None else request.top_p
        keeping = keeping_of(record, _nothing)
        opening = msgspec.structs.replace(
            opening_of(record.id, request, model.name, temperature, top_p, keeping),
            status="queued",
        )
        if record.conversation is not None:
            await conversations.lock(self.kept, owner, record.conversation, record.id)
        try:
            given = await _encoded_input(call, incoming, record.id)
            own = await self.kept.write(owner, "input", given)
            del given
            body = await prepared(incoming.size, encoded, request, incoming.parsed.lifted)
            kept = replace(
                record,
                request=await self.kept.write(owner, "request", body),
                input=own,
                output=await self.kept.write(owner, "output", msgspec.json.encode(opening)),
            )
            await self.kept.add(owner, kept)
        except BaseException:
            if record.conversation is not None:
                await conversations.unlock(self.kept, owner, record.conversation, record.id)
            raise
        await self.kept.add_job(owner, record.id)
        self._queued.set()
        if streams:
            await self.stream(call, owner, record.id, -1)
        else:
            await call.json(opening)

    async def shown(self, call: Call, owner: str, id_: str) -> bytes:
        """Return a response as JSON. Raises as `Kept.get` and `reserve`."""
        record, body = await self._output(call, owner, id_)
        if record.status == "in_progress":
            body = body.replace(b'"status":"queued"', b'"status":"in_progress"', 1)
        return body

    async def _output(self, call: Call, owner: str, id_: str) -> tuple[ResponseRecord, bytes]:
        async def read(record: ResponseRecord) -> bytes:
            reserve(call, record.output)
            return await self.kept.read(record.output)

        return await self.kept.content(owner, id_, ResponseRecord, read)

    async def stream(self, call: Call, owner: str, id_: str, after: int) -> None:
        """Send the events of a background response behind number `after`, until it has ended.

        Raises:
            InvalidRequestError: it was not made in the background.
            NotFoundError: this owner has no such response.
        """
        record = await self.kept.get(owner, id_, ResponseRecord)
        if not record.background:
            raise InvalidRequestError(
                "this response was not made with background: true; its events were sent to the "
                "client that asked for them, and are not kept",
                param="stream",
            )
        stream = EventStream(call.send, NAMED, call.exchange)
        async with RequestScope(call.server.inflight, call.receive, None):
            async for line in self._events(call, owner, record, after):
                await stream.write([framed(line)])
            await stream.finish([])

    async def _events(
        self, call: Call, owner: str, record: ResponseRecord | None, after: int
    ) -> AsyncIterator[bytes]:
        number = seen = held = 0
        while record is not None:
            size = PIECES_HELD * max((piece.size for piece in record.events), default=0)
            call.reserve(max(0, size - held))
            held = max(held, size)
            gone: NotFoundError | None = None
            try:
                async for line in lines_in(self.kept.contents.stream(record.events, seen)):
                    seen += len(line) + 1
                    if number > after:
                        yield line
                    number += 1
            except NotFoundError as error:
                gone = error
            if record.ended and gone is None:
                return
            await asyncio.sleep(POLL_SECONDS)
            before = record.events
            _, record = await self.kept.find(owner, record.id, ResponseRecord)
            if gone is not None and record is not None and record.events == before:
                raise gone  # else they were joined meanwhile

    async def cancel(self, call: Call, owner: str, id_: str) -> bytes:
        """Cancel a background response; one that has ended stays as it is. Return it.

        Raises:
            InvalidRequestError: it was not made in the background.
            InlayError: as `Kept.get`.
        """
        record, shown = await self._output(call, owner, id_)
        if not record.background:
            raise InvalidRequestError(
                "only a response that was made with background: true can be cancelled",
                param="response_id",
            )
        if record.ended:
            return await self.shown(call, owner, id_)
        response: dict[str, Any] = msgspec.json.decode(shown)
        body = msgspec.json.encode({**response, "status": "cancelled"})
        before = (*record.output, *record.request)
        output = await self.kept.write(owner, "output", body, instead_of=before)

        def cancelled(found: ResponseRecord) -> ResponseRecord:
            if found.ended:
                return found
            return replace(found, status="cancelled", output=output, request=())

        changed = await self.kept.change(owner, id_, ResponseRecord, cancelled)
        if changed.output == output:
            await self.kept.erase(owner, before)
            await self.jobs.end(owner, changed)
        else:
            await self.kept.erase(owner, output)
        self.jobs.stop(owner, id_)
        return await self.shown(call, owner, id_)

    async def delete(self, owner: str, id_: str) -> None:
        """Remove a response; one under way is cancelled. Raises as `Kept.get`."""
        record = await self.kept.drop(owner, id_, ResponseRecord)
        self.jobs.stop(owner, id_)
        await self.jobs.end(owner, record)

    # What it runs.

    async def _sweep(self) -> None:
        for owner, id_ in await self.kept.sweep(ORPHAN_SECONDS):
            await self.kept.add_job(owner, id_)

    def _metrics(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "inlay:background_responses",
            "Background responses that this frontend makes.",
            value=len(self.jobs) if self._place.is_open else 0,
        )


async def _encoded_input(
    call: Call, incoming: ParsedRequest[ResponsesRequest], id_: str
) -> bytearray:
    """Return the items of a request as they are kept. Raises as `RequestMemory.hold`."""
    request, lifted = incoming.parsed.request, incoming.parsed.lifted
    call.memory.hold(incoming.size)
    return await call.server.run_prepared(
        incoming.size, lambda: encoded(items_of(request.input, id_), lifted)
    )


async def _nothing(_: Response) -> None:
    """Stand for keeping where nothing is complete yet."""


def _check_apart(responses: str, batches: str) -> None:
    shared = {"memory", "nats", "off"}
    if not {responses, batches} & shared and Path(responses).resolve() == Path(batches).resolve():
        raise InvalidRequestError(
            f"{_FLAG} and --batch-store are the same directory, {responses}: give each its own",
            param="response_store",
        )


def _is_stored(request: ResponsesRequest, incoming: ParsedRequest[ResponsesRequest]) -> bool:
    """Return True if the response is to be kept. Raises `InvalidRequestError`."""
    why = None
    if request.request_id is not None:
        why = "request_id names it: ids of kept responses are the server's own"
    elif incoming.parts:
        why = "its embeddings are parts of the body: send them as data or ref"
    if why is not None and request.store:
        raise InvalidRequestError(f"store: the response cannot be kept, as {why}", param="store")
    stored = request.store is not False and why is None
    if request.background and not stored:
        raise InvalidRequestError(
            "background needs a response that is kept: store must not be false, and "
            "request_id and parts of the body not be used",
            param="background",
        )
    return stored


def _conversation_of(request: ResponsesRequest) -> str | None:
    """Return the id of a request's conversation. Raises `InvalidRequestError`."""
    given = request.conversation
    if given is None:
        return None
    id_ = given.get("id") if isinstance(given, dict) else given
    if not isinstance(id_, str):
        raise InvalidRequestError(
            "conversation must be an id, or an object with an id", param="conversation"
        )
    if request.previous_response_id is not None:
        raise InvalidRequestError(
            "conversation and previous_response_id exclude each other", param="conversation"
        )
    return id_
