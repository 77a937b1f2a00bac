"""One background response, made by the route's own function until it has ended.

Its events are published in pieces, each by one compare-and-set with the lease: what is not in the
record does not exist. Whoever takes it over makes it again, with the same seed, and goes on where
the published events end.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import msgspec

from inlay.api.openai.responses.shape import FAILURE_CODES
from inlay.base import liveness
from inlay.base.errors import (
    EngineError,
    InlayError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
)
from inlay.http.asgi import Message
from inlay.http.errors import shown
from inlay.store.kept.contents import Piece, new_name
from inlay.store.kept.joining import join_small
from inlay.store.kept.lease import RENEW_SECONDS, Lease, LeaseLostError, replace
from inlay_state import conversations
from inlay_state.events import TERMINAL, DiffersError, EventLog, lines_of
from inlay_state.kept import Kept
from inlay_state.records import HeldResponse, ResponseRecord, Status

PUBLISH_SECONDS = 0.5
TRIES = 3
"""Times that it is made when it fails by the server's doing, or that a frontend has a fault."""

_WAIT_SECONDS, _MOST_SECONDS = 0.5, 15.0
_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_OTHER = "it was lost, and what was made again has another text"

T = TypeVar("T")

Attempt: TypeAlias = Callable[[bytes, Callable[[Message], Awaitable[None]]], Awaitable[None]]
"""Answers a body with a stream, as its route does. Raises `InlayError` before its first event."""


class Background:
    """A response that this frontend makes.

    Args:
        held: its record.
        owner: digest of its tenant.
        kept: where it goes.
        attempt: answers its body.
    """

    def __init__(
        self,
        held: HeldResponse,
        owner: str,
        kept: Kept,
        attempt: Attempt,
    ) -> None:
        self._held, self._owner, self._kept, self._attempt = held, owner, kept, attempt
        self._rest = b""
        self._last: dict[str, Any] | None = None
        self._log = EventLog([])
        self._queued: dict[str, Any] = {
            "id": held.record.id,
            "object": "response",
            "created_at": held.record.created_at,
            "output": [],
        }
        self._differs = False
        self._locked = -math.inf
        self._making: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Make it until it has ended.

        Raises:
            LeaseLostError: another frontend has it, or it was deleted.
            NotFoundError: a content is gone.
        """
        self._log = EventLog(lines_of(await self._content(lambda found: found.events)))
        self._queued = _decode(await self._content(lambda found: found.output))
        body = await self._content(lambda found: found.request)
        await self._patient(self._held.look)
        if self._held.record.ended:
            return
        self._making = making = asyncio.create_task(self._make(body))
        full: RateLimitedError | None = None
        try:
            await self._publish_until(making)
        except RateLimitedError as error:
            full = error
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        if full is not None:
            await self.fail(full)

    async def fail(self, error: InlayError) -> None:
        """End it as failed, without what was not published. Raises `LeaseLostError`."""
        del self._log.lines[self._log.published :]
        self._fail(error)
        await self._publish_end(bounded=False)

    def stop(self) -> None:
        """Stop making it: its client has cancelled it."""
        if self._making is not None:
            self._making.cancel()

    async def _publish_until(self, making: asyncio.Task[None]) -> None:
        renewed = liveness.now()
        while not making.done():
            await asyncio.wait([making], timeout=PUBLISH_SECONDS)
            if self._held.record.ended:
                return
            if making.done():
                break
            new = self._log.published < len(self._log.lines)
            if new or liveness.now() - renewed >= RENEW_SECONDS:
                await self._publish("in_progress")
                renewed = liveness.now()
            elif self._held.record.status == "queued":
                await self._publish("in_progress")
            else:
                await self._patient(self._held.look)
        await self._patient(self._held.look)
        if self._held.record.ended:
            return
        if making.cancelled():
            raise LeaseLostError
        making.result()
        await self._publish_end()

    async def _publish_end(self, *, bounded: bool = True) -> None:
        response = self._end()["response"]
        output = msgspec.json.encode(response)
        await self._publish(response["status"], output, bounded=bounded)

    async def _publish(
        self, status: Status, output: bytes | None = None, *, bounded: bool = True
    ) -> None:
        await self._hold_conversation()
        lines = self._log.lines[self._log.published :]
        data = b"".join(line + b"\n" for line in lines)
        events = await self._write("events", data, bounded)
        try:
            final = await self._write("output", output or b"", bounded)
        except RateLimitedError:
            await self._erase(events)
            raise
        epoch = self._held.record.renewed + 1

        def added(record: ResponseRecord) -> ResponseRecord:
            if record.ended or record.renewed >= epoch:
                return record
            done = output is not None
            return replace(
                record,
                status=status,
                renewed=epoch,
                events=(*record.events, *events),
                output=final if done else record.output,
                request=() if done else record.request,
            )

        before = self._held.record
        found = await self._patient(lambda: self._held.change(added))
        self._log.published += len(lines)
        named = {*found.pieces}
        # Another frontend may have ended it: then it has none of these.
        await self._erase([piece for piece in (*events, *final) if piece not in named])
        if final and named.issuperset(final):
            await self._erase([*before.request, *before.output])
        if not found.ended:
            await join_small(self._held, self._kept.contents, "events", new_name("events"))

    async def _hold_conversation(self) -> None:
        """Renew the lock of its conversation once in a while."""
        record, now = self._held.record, liveness.now()
        if record.conversation is None or now - self._locked < conversations.RENEW_SECONDS:
            return
        id_ = record.conversation
        await self._patient(lambda: conversations.renew(self._kept, self._owner, id_, record.id))
        self._locked = now

    async def _write(self, kind: str, data: bytes, bounded: bool) -> tuple[Piece, ...]:
        if not data:
            return ()
        return await self._patient(
            lambda: self._kept.write(self._owner, kind, data, bounded=bounded)
        )

    async def _erase(self, pieces: Sequence[Piece]) -> None:
        await self._patient(lambda: self._kept.erase(self._owner, pieces))

    async def _content(self, of: Callable[[ResponseRecord], Sequence[Piece]]) -> bytes:
        id_ = self._held.record.id
        _, body = await self._patient(
            lambda: self._kept.content(
                self._owner, id_, ResponseRecord, lambda found: self._kept.read(of(found))
            )
        )
        return body

    async def release(self) -> None:
        """Let another frontend go on at once. Raises as `Held.change`."""

        def released(record: ResponseRecord) -> ResponseRecord:
            return record if record.ended else replace(record, lease=Lease("", record.lease.epoch))

        with suppress(LeaseLostError):
            await self._held.change(released)

    async def _patient(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do it until the storage answers."""
        wait = _WAIT_SECONDS
        while True:
            try:
                return await act()
            except OverloadedError as error:
                _log.warning("response %s waits: %s", self._held.record.id, error.message)
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MOST_SECONDS)

    async def _make(self, body: bytes) -> None:
        tries, wait = 0, _WAIT_SECONDS
        while True:
            self._log.again()
            self._rest, self._last, self._differs = b"", None, False
            try:
                await self._attempt(body, self._take)
                error = self._failure()
            except InlayError as raised:
                if raised.status in (429, 503) and not self._is_late():
                    await asyncio.sleep(raised.retry_after or wait)
                    wait = min(2 * wait, _MOST_SECONDS)
                    continue
                error = raised
            if error is None:
                self._note(self._end())
            if self._differs:
                self._fail(EngineError(_OTHER))
            if error is None or self._differs:
                return
            tries += 1
            if error.status < 500 or tries >= TRIES:
                self._fail(error)
                return
            _log.warning("response %s is made again: %s", self._held.record.id, error.message)
            await asyncio.sleep(_WAIT_SECONDS)

    async def _take(self, message: Message) -> None:
        *whole, self._rest = (self._rest + message.get("body", b"")).split(b"\n\n")
        for block in whole:
            _, _, data = block.partition(b"data: ")
            event = _decode(data)
            if event["type"] in TERMINAL:
                self._last = self._last or event
            else:
                self._note(event)
            if self._differs:
                # Ends the generation; the route makes a failed stream of it.
                raise EngineError(_OTHER)

    def _note(self, event: dict[str, Any]) -> None:
        try:
            self._log.take(event)
        except DiffersError:
            self._differs = True

    def _is_late(self) -> bool:
        return self._kept.now() >= self._held.record.expires_at

    def _end(self) -> dict[str, Any]:
        assert self._last is not None, "it has been made"
        return self._last

    def _failure(self) -> InlayError | None:
        """Return why an attempt has failed in its stream; None if it has not."""
        last = self._last
        if last is None:
            return EngineError("it ended without an end")
        if last["type"] != "response.failed":
            return None
        why = last["response"]["error"]
        if why["code"] == "server_error":
            return EngineError(why["message"])
        return InvalidRequestError(why["message"], code=why["code"])

    def _fail(self, error: InlayError) -> None:
        """End it as failed."""
        body = shown(error)
        code = body.code or FAILURE_CODES.get(error.status, "server_error")
        response = {
            **self._opening,
            "status": "failed",
            "error": {"code": code, "message": body.message},
        }
        self._last = {"type": "response.failed", "response": response}
        line = msgspec.json.encode({**self._last, "sequence_number": len(self._log.lines)})
        self._log.lines.append(line)

    @property
    def _opening(self) -> dict[str, Any]:
        if not self._log.lines:
            return self._queued
        found: dict[str, Any] = _decode(self._log.lines[0])["response"]
        return found
