"""The frontend's end of a connection to one worker."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from inlay.base import liveness
from inlay.base.errors import DeadlineExceededError, InlayError, OverloadedError
from inlay.messages import commands
from inlay.messages.card import Address, ModelCard
from inlay.messages.commands import ReadStats, WorkerCommand
from inlay.messages.request import Output, Request
from inlay.messages.routing import KvEvents, KvSnapshot
from inlay.transport.api import FrameTransport
from inlay.transport.buffer_offers import ReplyBuffer
from inlay.transport.messages import (
    Cache,
    CacheChanged,
    Cancel,
    CommandCall,
    Dial,
    ForgetPrompt,
    FromWorker,
    GetCache,
    Outputs,
    Ready,
    ReplyFrame,
    SettledReference,
    SettleReference,
    Submit,
    WatchCache,
    WorkerFailed,
)
from inlay.transport.output_queue import DispatchQueue, OutputQueue
from inlay.transport.pending_calls import PendingCalls, snapshot_of

R = TypeVar("R")

SettleWith: TypeAlias = Callable[[str, bytes | None, bool], Awaitable[bytes | None]]
"""Answers `SettleReference`: key, own and replace."""

log = logging.getLogger(__name__)

GONE = "the worker is gone"
ASK_SECONDS = 2.0
"""Seconds between two signs of life that a worker is asked for."""
_CACHE_SECONDS = 10.0


class RequestStream:
    """`inlay.transport.api.Stream` over a connection."""

    def __init__(self, link: "PeerLink", request: Request) -> None:
        self._link = link
        self._request = request
        self._outputs = OutputQueue(link.dispatch_queue)
        self._cancelled = False
        self.sent: Any = None
        self.lent: ReplyBuffer | None = None

    def feed(self, output: Output) -> None:
        """Take an output of this request."""
        if not self._outputs.put(output):
            self.cancel()

    def fail(self, error: InlayError) -> None:
        """End with `error` after what has arrived."""
        self._outputs.fail(error)

    def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        return aiter(self._outputs)

    def aborted(self) -> Output:
        """Return the last output of a request that was never begun."""
        return self._request.end("abort")

    def cancel(self) -> None:
        """Stop the request; needs no answer."""
        if not self._cancelled:
            self._cancelled = True
            self._link.cancel(self._request.id)


class PeerLink:
    """The connection to one worker process; a `Worker` once its card has come.

    Args:
        id_: as `Worker.id`.
        carrier: the connection.
        changed: called when the worker is ready, has another card, or is gone.
        scope: part of the ids of requests at the worker, where several frontends share one; unique
            to the connection.
        settle: what a fleet keeps as a reference, as `SettleReference` asks; without it, what the
            worker itself has.

    Attributes:
        alive: the connection holds.
        failure: the worker's own reason why it will never be ready, or is not any more.
        dispatch_queue: of its streams.
    """

    def __init__(
        self,
        id_: str,
        carrier: FrameTransport[FromWorker],
        changed: Callable[[], None],
        *,
        scope: str = "",
        settle: SettleWith | None = None,
    ) -> None:
        self._settle = settle
        self._settling: set[asyncio.Task[None]] = set()
        self._id = id_
        self._carrier = carrier
        self._tell_changed = changed
        self._scope = scope
        self._settled = asyncio.Event()
        self._gone = asyncio.Event()
        self._card: ModelCard | None = None
        self._streams: dict[str, RequestStream] = {}
        self.dispatch_queue = DispatchQueue()
        self._ids = count()
        numbers = count()
        self._calls = PendingCalls[Any](numbers)
        self._caches = PendingCalls[KvSnapshot](numbers)
        self._on_cache_events: Callable[[KvEvents], None] | None = None
        self._asked_at: float | None = None
        self.alive = True
        self.failure: InlayError | None = None

    @property
    def id(self) -> str:
        """Unique in the plane, never used again."""
        return self._id

    @property
    def ready(self) -> bool:
        """True if it can be sent requests."""
        return self.alive and self._card is not None and self.failure is None

    @property
    def card(self) -> ModelCard:
        """The last card. Raises `OverloadedError` before the first."""
        if self._card is None:
            raise OverloadedError("the worker is not ready yet", retry_after=1)
        return self._card

    @property
    def last_card(self) -> ModelCard | None:
        """The last card, also when the worker is gone."""
        return self._card

    async def wait_settled(self) -> None:
        """Return when it can be sent requests, or never will be."""
        await self._settled.wait()

    async def wait_gone(self) -> None:
        """Return when the worker is gone."""
        await self._gone.wait()

    async def wait_ready(self) -> None:
        """Return when it can be sent requests.

        Raises:
            InlayError: the worker ended before; its own reason where it gave one.
        """
        await self._settled.wait()
        if self._card is None:
            raise self.failure or OverloadedError("the worker process ended before it was ready")

    def send(self, request: Request, answer_bytes: int = 0) -> RequestStream:
        """As `Worker.send`.

        Args:
            request: to send.
            answer_bytes: that its answer has at most, if that is known: where the worker shares
                memory with this process, the answer is made in it.
        """
        if not self.ready:
            raise OverloadedError(GONE, retry_after=1)
        if self._scope:
            request = replace(request, id=self._wire_id(request.id))
        stream = RequestStream(self, request)
        # Kept until the last output: the worker may write until then.
        lent = stream.lent = self._carrier.reserve_reply(answer_bytes) if answer_bytes else None
        stream.sent = self._carrier.send(Submit(request, None if lent is None else lent.place))
        self._streams[request.id] = stream
        return stream

    def _wire_id(self, id_: str) -> str:
        return f"{id_}{self._scope}.{next(self._ids)}"

    def cancel(self, request_id: str) -> None:
        """Stop a request it was sent."""
        stream = self._streams.get(request_id)
        if not self.alive or stream is None:
            return
        if self._carrier.withdraw(stream.sent):
            # The worker has not heard of it, and will not: nobody else can end it.
            self._take(stream.aborted())
        else:
            self._carrier.send(Cancel(request_id))

    async def call(self, command: WorkerCommand[R], within: float = 30.0) -> R:
        if not self.ready:
            raise OverloadedError(GONE, retry_after=1)
        try:
            reply: R = await self._calls.call(
                lambda number: self._say(CommandCall(number, commands.encode(command))), within
            )
            return reply
        except TimeoutError:
            raise DeadlineExceededError(
                f"the worker did not answer {commands.name_of(command)!r} within {within:g} s"
            ) from None

    def silence(self) -> float:
        """As `inlay.transport.api.Silences`; always 0 unless `ask_on` runs."""
        return 0.0 if self._asked_at is None else liveness.now() - self._asked_at

    async def ask_on(self) -> None:
        """Ask for signs of life, once it is ready and until it is gone."""
        await self._settled.wait()
        while self.ready:
            self._asked_at = liveness.now()
            with suppress(InlayError):
                await self.call(ReadStats(), within=math.inf)
            self._asked_at = None
            await asyncio.sleep(ASK_SECONDS)

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        self._on_cache_events = tell
        self._say(WatchCache())

    async def kv_snapshot(self) -> KvSnapshot:
        if not self.ready:
            raise OverloadedError(GONE, retry_after=1)
        try:
            return await self._caches.call(
                lambda number: self._say(GetCache(number)), _CACHE_SECONDS
            )
        except TimeoutError:
            raise OverloadedError(
                "the worker does not tell what it has cached", retry_after=1
            ) from None

    def forget_prompt(self, key: str | None) -> None:
        """Have the worker drop its copy of a stored prompt that was deleted; of all for None."""
        self._say(ForgetPrompt(key))

    def dial(self, address: Address, token: bytes) -> None:
        """Have the worker connect to a frontend that invited it."""
        self._say(Dial(address, token))

    def _say(self, message: object) -> None:
        self._carrier.send(message)

    async def run(self) -> None:
        """Take what the worker says until it is gone."""
        try:
            await self._carrier.deliver(self._heard)
        except EOFError:
            pass
        except (ValueError, msgspec.MsgspecError):
            # Nothing that follows can be trusted to be whole: to everyone waiting it is as if the
            # worker were gone.
            log.exception("worker %s sent what is no message", self._id)
            self._carrier.close()
        finally:
            self._end()

    def _heard(self, message: FromWorker) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._take(output)
            case Ready(card):
                self._card = card
                self._settled.set()
                self._tell_changed()
            case WorkerFailed(error):
                self.failure = error.to_error()
                self._tell_changed()
            case ReplyFrame(number, reply, error):
                self._calls.resolve(number, reply if error is None else error.to_error())
            case CacheChanged(events):
                if self._on_cache_events is not None:
                    self._on_cache_events(events)
            case Cache() as cache:
                self._caches.resolve(cache.number, snapshot_of(cache))
            case SettleReference() as question:
                task = asyncio.create_task(self._answer(question))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    async def _answer(self, question: SettleReference) -> None:
        data = question.own
        if self._settle is not None:
            data = await self._settle(question.key, question.own, question.replace)
        self._say(SettledReference(question.number, data))

    def _take(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish_reason is not None:
            # Only now has the engine let go of the rows: the memory may be used for another prompt.
            del self._streams[output.request_id]
            self._carrier.release(stream.sent)
        stream.feed(output)

    def _end(self) -> None:
        self.alive = False
        for task in self._settling:
            task.cancel()
        error = OverloadedError(GONE, retry_after=1)
        for stream in self._streams.values():
            stream.fail(error)
            self._carrier.release(stream.sent)
        self._streams.clear()
        self._calls.fail(error)
        self._caches.fail(error)
        self._settled.set()
        self._gone.set()
        self._tell_changed()

    def room(self, num_bytes: int) -> memoryview | None:
        return self._carrier.room(num_bytes) if self.alive else None

    def close(self) -> None:
        """Disconnect."""
        self._carrier.close()
