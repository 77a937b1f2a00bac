"""A frontend's end of its conversation with one worker."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import msgspec

from inlay.card import ModelCard, Stats
from inlay.errors import DeadlineExceededError, InlayError, OverloadedError
from inlay.prompt import Buffer
from inlay.request import Command, EmbedOutput, EmbedRequest, Output, Reply, Request
from inlay.routing import KvSnapshot
from inlay.transport import frames
from inlay.transport.messages import Cache, GetCache
from inlay.transport.nats.mailbox import Mailbox
from inlay.transport.nats.messages import (
    Acknowledge,
    Again,
    Answer,
    Beat,
    Call,
    Cancel,
    Embed,
    Embedded,
    Open,
    Pieces,
    Submit,
    ToFrontend,
)
from inlay.transport.nats.outbound import Outbound
from inlay.transport.nats.silence import Clock, Presence
from inlay.transport.nats.stream import NatsStream
from inlay.transport.pending_calls import PendingCalls, snapshot_of

GONE = "the worker is gone"
GONE_SECONDS = 3.0
"""A worker that gives no sign of life for so long is gone."""
GONE_UNHEARD_SECONDS = 1.5
"""The same where the server says that it does not listen any more."""

_REPEAT_SECONDS = 1.0
"""After how long a request that shows no trace at its worker is sent there again."""
_IGNORED_SECONDS = 3.0
"""After how long it is taken for lost."""
_AGAIN_SECONDS = 0.3
_CACHE_SECONDS = 10.0


@dataclass
class _Sent:
    """How far a request has come on its way.

    Attributes:
        encoded: the message.
        at: when it was first sent, or None while that was not possible.
        last: when it was last sent.
        known: the worker has shown that it has it.
        transfer: it is still on its way.
        asked: when pieces were last asked for again.
    """

    encoded: tuple[bytes, list[Buffer]]
    at: float | None = None
    last: float = 0.0
    known: bool = False
    transfer: Outbound | None = None
    asked: float = 0.0


class _Answered:
    """A request that is answered at once, as a stream is kept."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[EmbedOutput] = asyncio.get_running_loop().create_future()
        self.ended = False
        self.cancelled = False
        self.received = 0
        self.used = 0

    def fail(self, error: InlayError) -> None:
        self.ended = True
        if not self.answer.done():
            self.answer.set_exception(error)


class Link:
    """One incarnation of one worker, as `inlay.transport.api.Worker`.

    Attributes:
        participant: the worker's id as a participant, which its next incarnation keeps.
        beat: its last heartbeat.
    """

    def __init__(
        self,
        participant: str,
        beat: Beat,
        card: ModelCard,
        mailbox: Mailbox[ToFrontend],
        clock: Clock,
        numbers: "count[int]",
        connected: Callable[[], bool],
    ) -> None:
        self.participant = participant
        self.beat = beat
        self._card = card
        self._mailbox = mailbox
        self._clock = clock
        self._numbers = numbers
        self._connected = connected
        self._presence = Presence(
            clock, gone_after=GONE_SECONDS, gone_unheard_after=GONE_UNHEARD_SECONDS
        )
        self._open: dict[int, NatsStream | _Answered] = {}
        self._sent: dict[int, _Sent] = {}
        self._calls = PendingCalls[Reply](numbers)
        self._caches = PendingCalls[KvSnapshot](numbers)
        self._telling: asyncio.Handle | None = None
        self._failed = False

    # What a router sees.

    @property
    def id(self) -> str:
        """Unique in the plane, never used again."""
        return f"{self.participant}.{self.beat.incarnation}"

    @property
    def card(self) -> ModelCard:
        """What it announced last."""
        return self._card

    @card.setter
    def card(self, card: ModelCard) -> None:
        self._card = card

    @property
    def stats(self) -> Stats:
        """Its engine's counters at the last heartbeat."""
        return self.beat.stats

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return not self._failed and self.beat.state == "ready"

    @property
    def gone(self) -> bool:
        """Whether it has been silent for too long."""
        return self._presence.gone

    def send(self, request: Request) -> NatsStream:
        """As `Worker.send`."""
        self._check()
        number = next(self._numbers)
        stream = NatsStream(
            number, request, used=self._acknowledge_soon, cancel=lambda: self._cancel(number)
        )
        sent = _Sent(frames.encode(Submit(number, request)))
        self._open[number] = stream
        self._submit(number, sent)
        return stream

    async def embed(self, request: EmbedRequest) -> EmbedOutput:
        """As `Worker.embed`."""
        self._check()
        number = next(self._numbers)
        waiting = _Answered()
        sent = _Sent(frames.encode(Embed(number, request)))
        self._open[number] = waiting
        self._submit(number, sent)
        try:
            vectors = await waiting.answer
        except asyncio.CancelledError:
            self._cancel(number)
            self._forget(number)
            raise
        if vectors.error is not None:
            raise vectors.error.to_error()
        return msgspec.structs.replace(vectors, request_id=request.id)

    async def call(self, command: Command, within: float = 30.0) -> Reply:
        """As `Worker.call`."""
        self._check()
        try:
            return await self._calls.call(lambda number: self._ask(Call(number, command)), within)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the worker did not answer {command.name!r} within {within:g} s"
            ) from None

    async def kv_snapshot(self) -> KvSnapshot:
        """All it has cached. Raises `OverloadedError` when it is gone or does not answer."""
        self._check()
        try:
            return await self._caches.call(
                lambda number: self._ask(GetCache(number)), _CACHE_SECONDS
            )
        except TimeoutError:
            raise OverloadedError(
                "the worker does not tell what it has cached", retry_after=1
            ) from None

    def _ask(self, question: object) -> None:
        self._mailbox.send(self.participant, question, probe=True)

    def _check(self) -> None:
        if self._failed:
            raise OverloadedError(GONE, retry_after=1)

    # What comes.

    def hear(self, beat: Beat) -> None:
        """Take a heartbeat."""
        self.beat = beat
        self._presence.hear()

    def unheard(self) -> None:
        """Nobody listens to what is sent to it."""
        self._presence.unheard()

    def take(self, message: ToFrontend) -> None:
        """Take what the worker says, `Pieces` excepted."""
        self._presence.hear()
        match message:
            case Pieces(pieces):
                for number, index, output in pieces:
                    self._feed(number, index, output)
            case Open(streams):
                self._compare(dict(streams))
            case Embedded(number, vectors):
                waiting = self._open.get(number)
                if isinstance(waiting, _Answered):
                    waiting.ended = True
                    if not waiting.answer.done():
                        waiting.answer.set_result(vectors)
                self._forget(number)
            case Answer(number, reply):
                self._calls.resolve(number, reply)
            case Cache() as cache:
                self._caches.resolve(cache.number, snapshot_of(cache))

    def _feed(self, number: int, index: int, output: Output) -> None:
        stream = self._open.get(number)
        if not isinstance(stream, NatsStream):
            # Of a stream that was given up: its worker is told with the next acknowledgement, which
            # does not name it.
            self._acknowledge_soon()
            return
        self._sent[number].known = True
        if not stream.feed(index, output):
            self._ask_again(number, stream)
        elif stream.ended:
            self._mailbox.send(self.participant, Acknowledge(((number, stream.received),)))
            self._forget(number)
        elif stream.cancelled or output.prompt_logprobs is not None:
            self._acknowledge_soon()

    def _ask_again(self, number: int, stream: NatsStream | _Answered) -> None:
        sent, now = self._sent[number], self._clock.now()
        if now - sent.asked > _AGAIN_SECONDS:
            sent.asked = now
            self._mailbox.send(self.participant, Again(number, stream.received))

    def _compare(self, theirs: dict[int, int]) -> None:
        """What the worker has of ours, beside what we think it has."""
        now = self._clock.now()
        if not theirs.keys() <= self._open.keys():
            self._acknowledge_soon()
        for number, stream in list(self._open.items()):
            sent = self._sent[number]
            pieces = theirs.get(number)
            if pieces is not None:
                sent.known = True
                if pieces > stream.received:
                    self._ask_again(number, stream)
            elif sent.known:
                self._lose(number, f"{GONE}, or has given the request up")
            elif (
                sent.transfer is None
                and sent.at is not None
                and self._clock.silent(sent.at) > _IGNORED_SECONDS
            ):
                self._lose(number, "the worker does not take the request")
            elif sent.transfer is None and now - sent.last > _REPEAT_SECONDS:
                self._submit(number, sent)

    # What goes.

    def _submit(self, number: int, sent: _Sent) -> None:
        self._sent[number] = sent
        if not self._connected():
            return
        now = sent.last = self._clock.now()
        sent.at = now if sent.at is None else sent.at
        transfer = self._mailbox.send_encoded(self.participant, *sent.encoded, probe=True)
        if transfer is not None:
            sent.transfer = transfer
            transfer.done.add_done_callback(lambda done: self._arrived(number, done))

    def _arrived(self, number: int, done: "asyncio.Future[None]") -> None:
        sent = self._sent.get(number)
        if sent is None:
            return
        sent.transfer = None
        sent.at = sent.last = self._clock.now()
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._lose(number, str(error))

    def _cancel(self, number: int) -> None:
        sent = self._sent.get(number)
        if sent is None:
            return
        if sent.transfer is None and sent.at is not None:
            self._mailbox.send(self.participant, Cancel((number,)))
            return
        # The worker does not have it, so nothing will come from there.
        stream = self._open[number]
        self._forget(number)
        if isinstance(stream, NatsStream):
            stream.abort()
        if sent.transfer is not None:
            self._mailbox.transfers.withdraw(sent.transfer)

    def _acknowledge_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        self._telling = None
        streams = tuple((number, stream.used) for number, stream in self._open.items())
        self._mailbox.send(self.participant, Acknowledge(streams, all=True), probe=True)

    def tick(self) -> None:
        """Say again what must not be lost, twice a second."""
        if not self._open:
            return
        self._acknowledge()
        cancelled = tuple(
            number
            for number, stream in self._open.items()
            if stream.cancelled and self._sent[number].transfer is None
        )
        if cancelled:
            self._mailbox.send(self.participant, Cancel(cancelled))

    # Ends.

    def _forget(self, number: int) -> None:
        self._open.pop(number, None)
        self._sent.pop(number, None)

    def _lose(self, number: int, reason: str) -> None:
        stream = self._open.get(number)
        self._forget(number)
        if stream is not None:
            self._mailbox.send(self.participant, Cancel((number,)))
            stream.fail(OverloadedError(reason, retry_after=1))

    def fail(self, reason: str = GONE) -> None:
        """Give the worker up: end everything that waits for it, and tell it, should it wake."""
        self._failed = True
        error = OverloadedError(reason, retry_after=1)
        if self._open:
            self._mailbox.send(self.participant, Cancel(tuple(self._open)))
        for number, stream in list(self._open.items()):
            transfer = self._sent[number].transfer
            self._forget(number)
            stream.fail(error)
            if transfer is not None:
                self._mailbox.transfers.withdraw(transfer)
        self._calls.fail(error)
        self._caches.fail(error)
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
