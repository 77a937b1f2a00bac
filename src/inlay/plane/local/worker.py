"""The worker's end of the local plane."""

import asyncio

from inlay.plane.local.frontend import Carrier
from inlay.plane.messages import (
    Answer,
    AskCache,
    Boot,
    CacheTold,
    Call,
    Cancel,
    Deltas,
    Embed,
    Embedded,
    Ready,
    Submit,
    ToWorker,
    WatchCache,
)
from inlay.plane.questions import tell
from inlay.protocol.embedding import Vectors
from inlay.protocol.routing import KvEvents, TellsCache
from inlay.protocol.work import Delta, ModelCard, WorkHandler


class _Outbox:
    """Joins the deltas of one turn of the event loop into one message, and notes which works have not ended."""

    def __init__(self, channel: Carrier[ToWorker]) -> None:
        self._channel = channel
        self._deltas: list[Delta] = []
        self.under_way: set[str] = set()

    def put(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self.under_way.discard(delta.work_id)
        if not self._deltas:
            asyncio.get_running_loop().call_soon(self._flush)
        self._deltas.append(delta)

    def _flush(self) -> None:
        deltas, self._deltas = tuple(self._deltas), []
        self._channel.send(Deltas(deltas))

    def put_vectors(self, vectors: Vectors) -> None:
        self.under_way.discard(vectors.work_id)
        self._channel.send(Embedded(vectors))


async def serve(channel: Carrier[ToWorker], handler: WorkHandler) -> None:
    """Announce the card of `handler`, again whenever it changes, and drive `handler` until the frontend is gone; then every work it had sent is aborted."""
    outbox = _Outbox(channel)
    calls: set[asyncio.Task[None]] = set()

    def announce(card: ModelCard) -> None:
        channel.send(Ready(card))

    handler.watch(announce)
    try:
        while True:
            match await channel.receive():
                case Submit(work):
                    outbox.under_way.add(work.id)
                    handler.generate(work, outbox.put)
                case Embed(embed_work):
                    outbox.under_way.add(embed_work.id)
                    handler.embed(embed_work, outbox.put_vectors)
                case Cancel(work_id):
                    handler.abort(work_id)
                case Boot():
                    raise ValueError("a worker is started once")
                case WatchCache():
                    _watch_cache(channel, handler)
                case (Call() | AskCache()) as question:
                    task = asyncio.create_task(_answer(channel, handler, question))
                    calls.add(task)
                    task.add_done_callback(calls.discard)
    except EOFError:
        return
    finally:
        for work_id in tuple(outbox.under_way):
            handler.abort(work_id)
        for task in calls:
            task.cancel()


def _watch_cache(channel: Carrier[ToWorker], handler: WorkHandler) -> None:
    def told(events: KvEvents) -> None:
        channel.send(CacheTold(events))

    if isinstance(handler, TellsCache):
        handler.watch_cache(told)


async def _answer(channel: Carrier[ToWorker], handler: WorkHandler, question: Call | AskCache) -> None:
    if isinstance(question, Call):
        channel.send(Answer(question.number, await handler.call(question.command)))
    else:
        channel.send(await tell(question.number, handler))
