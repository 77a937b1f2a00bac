"""Response of a generation, streamed or whole."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from inlay.api.fields import Named, in_own_names
from inlay.api.generation.choices import ChoiceState
from inlay.api.generation.generation import Generation, Pieces, WholeSink
from inlay.api.generation.grammars import own_fields
from inlay.api.schema.described import StageUsage
from inlay.api.schema.generation import GenerationRequest
from inlay.base.errors import InlayError, InvalidRequestError
from inlay.http.bodies.connection import TextWriter
from inlay.http.errors import ClientGone, internal_error
from inlay.http.request_scope import RequestScope
from inlay.http.server import OFFLOAD_BYTES, Call
from inlay.http.sse import UNNAMED, Event, EventFraming, EventStream, TextEvents
from inlay.messages.request import EngineUsage
from inlay.router import ServedModel

_log = logging.getLogger(__name__)

TOKEN_BYTES = 32
"""Bytes of work that a token of a whole response counts as: long ones are made in a thread."""


class ResponseShape(Protocol):
    """Response of a generation in one API's form."""

    def events(self, pieces: Pieces) -> Sequence[Event]:
        """Return the events for some pieces."""

    def texts(self, choice: ChoiceState) -> TextEvents | None:
        """Return the events of a choice's pieces that have nothing but text.

        None if such a piece is not one event, or its choice has not begun.
        """

    def closing_events(self) -> Sequence[Event]:
        """Return the events after the last choice's end."""

    def failure_events(self, error: InlayError) -> Sequence[Event]:
        """Return the events that end a stream because of `error`."""

    def response(self) -> msgspec.Struct:
        """Return the whole response, made of the choices' `pieces`."""


class NamedWorkers:
    """Comments in a stream that name the worker of what follows; no client takes them for events.

    `: worker ID` stands before a choice's first event, and before its first by another worker; for
    choices after the first one it is `: worker ID choice N`.
    """

    def __init__(self) -> None:
        self._last: dict[int, str | None] = {}

    def of(self, pieces: Pieces) -> Sequence[Event]:
        """Return the comments before the events of `pieces`."""
        found: list[Event] = []
        for choice, _ in pieces:
            if self._last.get(choice.index) != choice.worker:
                self._last[choice.index] = choice.worker
                which = f" choice {choice.index}" if choice.index else ""
                found.append(f": worker {choice.worker}{which}\n\n".encode())
        return found


_MAX_SESSION = 512
"""Maximum characters of a session's name."""


def session_of(call: Call, request: GenerationRequest) -> str | None:
    """Return the name of a request's session, prefixed by its tenant; None if it names none.

    Fields of the body take precedence over the header.

    Raises:
        InvalidRequestError: the name is empty or too long.
    """
    named, param = request.session_id, "session_id"
    if named is None:
        named, param = request.prompt_cache_key, "prompt_cache_key"
    if named is None:
        value = call.headers.get(b"x-session-id")
        if value is None:
            return None
        named, param = value.decode("latin-1"), "X-Session-Id"
    if not 0 < len(named) <= _MAX_SESSION:
        raise InvalidRequestError(
            f"{param} must have 1 to {_MAX_SESSION} characters, got {len(named)}", param=param
        )
    return f"{call.caller.tenant.id}/{named}"


class _Written:
    """Pieces as events of a stream."""

    def __init__(
        self, call: Call, generation: Generation, shape: ResponseShape, framing: EventFraming
    ) -> None:
        self.stream = EventStream(call.send, framing, call.exchange)
        self._prepare = call.server.run_prepared
        self._generation = generation
        self._shape = shape
        shows_workers = call.caller.admin and b"x-show-workers" in call.headers
        self._named = NamedWorkers() if shows_workers else None

    def ready(self) -> bool:
        return self.stream.ready() and self._generation.bulk < OFFLOAD_BYTES

    def take(self, pieces: Pieces) -> Awaitable[None] | None:
        if self._generation.bulk >= OFFLOAD_BYTES:
            return self._take_bulk(pieces)
        events = self._with_workers(pieces, self._shape.events(pieces))
        return None if self.stream.write_now(events) else self.stream.write(events)

    async def _take_bulk(self, pieces: Pieces) -> None:
        events = await self._prepare(self._generation.bulk, self._shape.events, pieces)
        await self.stream.write(self._with_workers(pieces, events))

    def _with_workers(self, pieces: Pieces, events: Sequence[Event]) -> Sequence[Event]:
        return events if self._named is None else [*self._named.of(pieces), *events]

    def texts(self, choice: ChoiceState) -> TextWriter | None:
        events = self._shape.texts(choice)
        return None if events is None else self.stream.text_writer(events)

    async def fail(self, error: InlayError) -> None:
        """End the stream because of an error."""
        await self.stream.finish(self._shape.failure_events(error))


async def respond(
    call: Call,
    request: GenerationRequest,
    model: ServedModel,
    generation: Generation,
    make_shape: Callable[[], ResponseShape],
    framing: EventFraming = UNNAMED,
    rest: Callable[[EventStream | None], Awaitable[None]] | None = None,
    named: Named = lambda error: error,
) -> None:
    """Run `generation` and answer the call in the shape of `make_shape`.

    The shape is made once the requests are at a worker. A stream starts with the first tokens, so
    that an engine's refusal is an HTTP status and not an event. `rest` does what follows the text,
    and writes to the stream where there is one. `named` is of the route's `own_names`, for errors
    in the stream; those that are raised pass it anyway.

    Raises:
        InlayError: before the first event; later errors are events.
        ClientGone: the client left; the engine requests are cancelled.
    """
    session = session_of(call, request)
    written: _Written | None = None

    def grow(size: int) -> None:
        call.reservation.grow(size)
        generation.bulk += size

    try:
        async with RequestScope(call.server.inflight, call.receive, call.detach_deadline()):
            await call.server.awake(model.card.name)
            call.sent = time.perf_counter()
            await generation.start(call.server.router, model.card, session=session)
            shape = make_shape()
            if request.stream:
                written = _Written(call, generation, shape, framing)
            await generation.each(written or WholeSink(grow))
            if generation.states is not None:
                generation.bulk += await generation.states.finish(call, generation.choices)
            if rest is not None:
                await rest(None if written is None else written.stream)
    except (InlayError, ClientGone) as error:
        if isinstance(error, ClientGone):
            raise
        error = in_own_names(error, own_fields(request))
        if written is None or not written.stream.started:
            raise error from None
        call.failed = error = named(error)
        call.server.metrics.failed(error)
        await written.fail(error)
        return
    except Exception as error:
        if written is None or not written.stream.started:
            raise
        call.failed = error
        _log.exception("request %s failed in its stream", call.request_id)
        await written.fail(internal_error(call.request_id))
        return
    finally:
        generation.close()
    if written is not None:
        events = shape.closing_events()
        if generation.states is not None:
            prepare = call.server.run_prepared
            events = await prepare(generation.bulk, _encoded, events, framing)
        await written.stream.finish(events)
        return
    tokens = sum(choice.completion_tokens for choice in generation.choices)
    await call.prepared_json(generation.bulk + tokens * TOKEN_BYTES, shape.response)


def stages_of(
    usages: Mapping[str, EngineUsage] | Mapping[str | None, EngineUsage],
) -> dict[str, StageUsage] | msgspec.UnsetType:
    """Return the share of each stage by its name; nothing of a model that is no pipeline."""
    found = {
        name: StageUsage(usage.prompt_tokens, usage.completion_tokens)
        for name, usage in usages.items()
        if name is not None
    }
    return found or msgspec.UNSET


def _encoded(events: Sequence[Event], framing: EventFraming) -> list[Event]:
    return [each if isinstance(each, bytes) else framing.event(each) for each in events]
