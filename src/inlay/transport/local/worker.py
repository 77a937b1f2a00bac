"""The worker's end of the local plane."""

import asyncio

from inlay.card import ModelCard
from inlay.request import EmbedOutput, Output
from inlay.routing import CacheEventSource, KvEvents
from inlay.transport.api import RequestHandler
from inlay.transport.local.frontend import Carrier
from inlay.transport.messages import (
    Answer,
    Boot,
    CacheChanged,
    Call,
    Cancel,
    Embed,
    Embedded,
    GetCache,
    Outputs,
    Ready,
    Submit,
    ToWorker,
    WatchCache,
)
from inlay.transport.pending_calls import answer_cache


class _Outbox:
    """Joins the outputs of one turn of the event loop into one message, and notes which requests have not ended."""

    def __init__(self, channel: Carrier[ToWorker]) -> None:
        self._channel = channel
        self._deltas: list[Output] = []
        self.under_way: set[str] = set()

    def put(self, output: Output) -> None:
        if output.finish_reason is not None:
            self.under_way.discard(output.request_id)
        if not self._deltas:
            asyncio.get_running_loop().call_soon(self._flush)
        self._deltas.append(output)

    def _flush(self) -> None:
        outputs, self._deltas = tuple(self._deltas), []
        self._channel.send(Outputs(outputs))

    def put_vectors(self, vectors: EmbedOutput) -> None:
        self.under_way.discard(vectors.request_id)
        self._channel.send(Embedded(vectors))


async def serve(channel: Carrier[ToWorker], handler: RequestHandler) -> None:
    """Announce the card of `handler`, again whenever it changes, and drive `handler` until the frontend is gone; then every request it had sent is aborted."""
    outbox = _Outbox(channel)
    calls: set[asyncio.Task[None]] = set()

    def announce(card: ModelCard) -> None:
        channel.send(Ready(card))

    handler.watch(announce)
    try:
        while True:
            match await channel.receive():
                case Submit(request):
                    outbox.under_way.add(request.id)
                    handler.generate(request, outbox.put)
                case Embed(embed_request):
                    outbox.under_way.add(embed_request.id)
                    handler.embed(embed_request, outbox.put_vectors)
                case Cancel(request_id):
                    handler.abort(request_id)
                case Boot():
                    raise ValueError("a worker is started once")
                case WatchCache():
                    _watch_cache(channel, handler)
                case (Call() | GetCache()) as question:
                    task = asyncio.create_task(_answer(channel, handler, question))
                    calls.add(task)
                    task.add_done_callback(calls.discard)
    except EOFError:
        return
    finally:
        for request_id in tuple(outbox.under_way):
            handler.abort(request_id)
        for task in calls:
            task.cancel()


def _watch_cache(channel: Carrier[ToWorker], handler: RequestHandler) -> None:
    def told(events: KvEvents) -> None:
        channel.send(CacheChanged(events))

    if isinstance(handler, CacheEventSource):
        handler.watch_cache(told)


async def _answer(
    channel: Carrier[ToWorker], handler: RequestHandler, question: Call | GetCache
) -> None:
    if isinstance(question, Call):
        channel.send(Answer(question.number, await handler.call(question.command)))
    else:
        channel.send(await answer_cache(question.number, handler))
