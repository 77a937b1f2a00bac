"""The frontend's end of the local plane."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from inlay.card import ModelCard
from inlay.errors import DeadlineExceededError, InlayError, OverloadedError
from inlay.prompt import Buffer
from inlay.request import Command, EmbedOutput, EmbedRequest, Output, Reply, Request
from inlay.routing import KvEvents, KvSnapshot
from inlay.transport.api import Worker
from inlay.transport.messages import (
    Answer,
    Cache,
    CacheChanged,
    Call,
    Cancel,
    Embed,
    Embedded,
    Failed,
    FromWorker,
    GetCache,
    Outputs,
    Ready,
    Submit,
    WatchCache,
)
from inlay.transport.output_queue import OutputQueue
from inlay.transport.pending_calls import PendingCalls, snapshot_of

log = logging.getLogger(__name__)

Heard_co = TypeVar("Heard_co", covariant=True)

GONE = "the worker process is gone"
_CACHE_SECONDS = 10.0


class Carrier(Protocol[Heard_co]):
    """A connection that carries messages.

    `Channel` on a machine, `inlay.transport.Connection` between them.
    """

    def send(self, message: object) -> Any:
        """Send a message without waiting; return what `release` and `withdraw` take."""
        ...

    def release(self, sent: Any) -> None:
        """Free what a message occupies here, as the other end reads it no more."""
        ...

    def withdraw(self, sent: Any) -> bool:
        """Stop sending a message; False when it has left."""
        ...

    def room(self, num_bytes: int) -> memoryview | None:
        """Return memory of which a buffer in a message is not copied; None where there is none."""
        ...

    async def receive(self) -> Heard_co:
        """Return the next message. Raises `EOFError` when the other end is gone."""
        ...

    def close(self) -> None:
        """Close the connection. What was sent still leaves."""
        ...


class LocalStream:
    """`inlay.transport.api.Stream` over a local connection."""

    def __init__(self, link: "Link", request: Request) -> None:
        self._link = link
        self._work = request
        self._deltas = OutputQueue()
        self._cancelled = False
        self.sent: Any = None

    def feed(self, output: Output) -> None:
        """Take an output of this request."""
        self._deltas.put(output)

    def fail(self, error: InlayError) -> None:
        """End with `error` after what has arrived."""
        self._deltas.fail(error)

    def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        return aiter(self._deltas)

    def aborted(self) -> Output:
        """Return the last output of a request that was never begun."""
        return Output(
            self._work.id, self._work.attempt, len(self._work.prior_output), finish_reason="abort"
        )

    def cancel(self) -> None:
        """Stop the request; needs no answer."""
        if not self._cancelled:
            self._cancelled = True
            self._link.cancel(self._work.id)


class _Embedding(NamedTuple):
    """A request whose vectors have not come, and what its message occupies until they do."""

    answer: "asyncio.Future[EmbedOutput]"
    sent: Any

    def aborted(self, request_id: str) -> EmbedOutput:
        """Return the answer of a request that was never begun; nobody waits for it."""
        return EmbedOutput(request_id, 0, Buffer(b""))


class Link:
    """The connection to one worker process; a `Worker` once the card has come.

    Attributes:
        alive: whether it holds.
        failure: why the worker will never be ready, or is no longer, where it said so.
    """

    def __init__(self, id_: str, channel: Carrier[FromWorker], tell: Callable[[], None]) -> None:
        self._id = id_
        self._channel = channel
        self._tell = tell
        self._settled = asyncio.Event()
        self._gone = asyncio.Event()
        self._card: ModelCard | None = None
        self._streams: dict[str, LocalStream] = {}
        self._embeddings: dict[str, _Embedding] = {}
        numbers = count()
        self._calls = PendingCalls[Reply](numbers)
        self._caches = PendingCalls[KvSnapshot](numbers)
        self._tell_cache: Callable[[KvEvents], None] | None = None
        self.alive = True
        self.failure: InlayError | None = None

    @property
    def id(self) -> str:
        """Unique in the plane, never used again."""
        return self._id

    @property
    def ready(self) -> bool:
        """Whether it can be sent requests."""
        return self.alive and self._card is not None and self.failure is None

    @property
    def card(self) -> ModelCard:
        """What it announced last. Raises `OverloadedError` before it has."""
        if self._card is None:
            raise OverloadedError("the worker is not ready yet", retry_after=1)
        return self._card

    @property
    def last_card(self) -> ModelCard | None:
        """What it announced last, also when it is gone."""
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

    def send(self, request: Request) -> LocalStream:
        """As `Worker.send`."""
        if not self.ready:
            raise OverloadedError(GONE, retry_after=1)
        stream = LocalStream(self, request)
        stream.sent = self._channel.send(Submit(request))
        self._streams[request.id] = stream
        return stream

    async def embed(self, request: EmbedRequest) -> EmbedOutput:
        """As `Worker.embed`."""
        if not self.ready:
            raise OverloadedError(GONE, retry_after=1)
        answer: asyncio.Future[EmbedOutput] = asyncio.get_running_loop().create_future()
        self._embeddings[request.id] = _Embedding(answer, self._channel.send(Embed(request)))
        try:
            vectors = await answer
        except asyncio.CancelledError:
            self.cancel(request.id)
            raise
        if vectors.error is not None:
            raise vectors.error.to_error()
        return vectors

    def cancel(self, request_id: str) -> None:
        """Stop a request it was sent."""
        waiting = self._streams.get(request_id) or self._embeddings.get(request_id)
        if not self.alive or waiting is None:
            return
        if not self._channel.withdraw(waiting.sent):
            self._channel.send(Cancel(request_id))
        elif isinstance(waiting, LocalStream):
            # The worker has not heard of it, and will not: nobody else can end it.
            self._take(waiting.aborted())
        else:
            self._take_vectors(waiting.aborted(request_id))

    async def call(self, command: Command, within: float = 30.0) -> Reply:
        """As `Worker.call`."""
        if not self.ready:
            raise OverloadedError(GONE, retry_after=1)
        try:
            return await self._calls.call(lambda number: self._say(Call(number, command)), within)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the worker did not answer {command.name!r} within {within:g} s"
            ) from None

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        """As `inlay.routing.CacheEventSource`."""
        self._tell_cache = tell
        self._say(WatchCache())

    async def kv_snapshot(self) -> KvSnapshot:
        """As `inlay.routing.CacheEventSource`."""
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

    def _say(self, message: object) -> None:
        self._channel.send(message)

    async def run(self) -> None:
        """Take what the worker says until it is gone."""
        try:
            while True:
                match await self._channel.receive():
                    case Outputs(outputs):
                        for output in outputs:
                            self._take(output)
                    case Embedded(vectors):
                        self._take_vectors(vectors)
                    case Ready(card):
                        self._card = card
                        self._settled.set()
                        self._tell()
                    case Failed(error):
                        self.failure = error.to_error()
                        self._tell()
                    case Answer(number, reply):
                        self._calls.resolve(number, reply)
                    case CacheChanged(events):
                        if self._tell_cache is not None:
                            self._tell_cache(events)
                    case Cache() as cache:
                        self._caches.resolve(cache.number, snapshot_of(cache))
        except EOFError:
            pass
        except (ValueError, msgspec.MsgspecError):
            # Nothing that follows can be trusted to be whole: to everyone waiting it is as if the
            # worker were gone.
            log.exception("worker %s sent what is no message", self._id)
            self._channel.close()
        finally:
            self._end()

    def _take(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finish_reason is not None:
            # Only now has the engine let go of the rows: the memory may be used for another prompt.
            del self._streams[output.request_id]
            self._channel.release(stream.sent)
        stream.feed(output)

    def _take_vectors(self, vectors: EmbedOutput) -> None:
        embedding = self._embeddings.pop(vectors.request_id, None)
        if embedding is None:
            return
        self._channel.release(embedding.sent)
        if not embedding.answer.done():
            embedding.answer.set_result(vectors)

    def _end(self) -> None:
        self.alive = False
        error = OverloadedError(GONE, retry_after=1)
        for embedding in self._embeddings.values():
            if not embedding.answer.done():
                embedding.answer.set_exception(error)
            self._channel.release(embedding.sent)
        self._embeddings.clear()
        for stream in self._streams.values():
            stream.fail(error)
            self._channel.release(stream.sent)
        self._streams.clear()
        self._calls.fail(error)
        self._caches.fail(error)
        self._settled.set()
        self._gone.set()
        self._tell()

    def room(self, num_bytes: int) -> memoryview | None:
        """As `Plane.room`."""
        return self._channel.room(num_bytes) if self.alive else None

    def close(self) -> None:
        """Disconnect."""
        self._channel.close()


class LocalPlane:
    """`inlay.transport.api.Plane` over connections to this machine's worker processes, which come and go."""

    def __init__(self, channels: Iterable[Carrier[FromWorker]] = ()) -> None:
        self._changed = asyncio.Event()
        self._numbers = count()
        self._links = [self._link(channel) for channel in channels]
        self._tasks: dict[Link, asyncio.Task[None]] = {}
        self._missing: dict[str, str] = {}

    def _link(self, channel: Carrier[FromWorker]) -> Link:
        return Link(f"local-{next(self._numbers)}", channel, self._tell)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begin to listen to the workers."""
        for link in self._links:
            self._listen(link)

    def _listen(self, link: Link) -> None:
        self._tasks[link] = asyncio.create_task(link.run())

    def add(self, channel: Carrier[FromWorker]) -> Link:
        """Listen to one more worker, of the plane until it is removed."""
        link = self._link(channel)
        self._links.append(link)
        self._listen(link)
        return link

    async def remove(self, link: Link) -> None:
        """Disconnect from a worker and forget it."""
        link.close()
        await self._tasks.pop(link)
        self._links.remove(link)

    async def wait_ready(self) -> None:
        """Return when every worker is ready.

        Raises:
            InlayError: one ended before; its own reason where it gave one.
        """
        for link in tuple(self._links):
            await link.wait_ready()

    def workers(self) -> Sequence[Worker]:
        """The workers that are ready now."""
        return [link for link in self._links if link.ready]

    def set_unavailable(self, name: str, reason: str | None) -> None:
        """Say that a worker is not there that should be, and why; with None, that it is."""
        if reason is None:
            self._missing.pop(name, None)
        else:
            self._missing[name] = reason

    def unavailable(self) -> Mapping[str, str]:
        """As `Plane.missing`."""
        return self._missing

    async def changed(self) -> None:
        """Return at the next change of the set of ready workers or of a card."""
        await self._changed.wait()

    def room(self, num_bytes: int) -> memoryview | None:
        """Of the only worker's shared memory.

        None where there are several, or too little of it is free.
        """
        return self._links[0].room(num_bytes) if len(self._links) == 1 else None

    async def close(self) -> None:
        """Disconnect; the workers abort what is under way and end."""
        for link in tuple(self._tasks):
            await self.remove(link)
