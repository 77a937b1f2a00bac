"""The worker's end of a connection to a frontend."""

import asyncio

from inlay.card import ModelCard
from inlay.request import EmbedOutput, Output
from inlay.routing import CacheEventSource, KvEvents
from inlay.transport.api import Carrier, RequestHandler
from inlay.transport.messages import (
    Answer,
    Boot,
    CacheChanged,
    Call,
    Cancel,
    Embed,
    Embedded,
    ForgetPrompt,
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
        self._outputs: list[Output] = []
        self.running: set[str] = set()

    def put(self, output: Output) -> None:
        if output.finish_reason is not None:
            self.running.discard(output.request_id)
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = tuple(self._outputs), []
        self._channel.send(Outputs(outputs))

    def put_vectors(self, vectors: EmbedOutput) -> None:
        self.running.discard(vectors.request_id)
        self._channel.send(Embedded(vectors))


async def serve(channel: Carrier[ToWorker], handler: RequestHandler) -> None:
    """Serve one frontend until its connection ends; then abort every request it had sent.

    The card of `handler` is announced at once, and again whenever it changes.
    """
    outbox = _Outbox(channel)
    calls: set[asyncio.Task[None]] = set()

    def announce(card: ModelCard) -> None:
        channel.send(Ready(card))

    def take(message: ToWorker) -> None:
        match message:
            case Submit(request):
                outbox.running.add(request.id)
                handler.generate(request, outbox.put)
            case Embed(request):
                outbox.running.add(request.id)
                handler.embed(request, outbox.put_vectors)
            case Cancel(request_id):
                handler.abort(request_id)
            case Boot():
                raise ValueError("a worker is started once")
            case ForgetPrompt(key):
                handler.forget_prompt(key)
            case WatchCache():
                _watch_cache(channel, handler)
            case (Call() | GetCache()) as question:
                task = asyncio.create_task(_answer(channel, handler, question))
                calls.add(task)
                task.add_done_callback(calls.discard)

    unwatch = handler.watch(announce)
    try:
        while True:
            # No name holds the last message: its rows may be large.
            take(await channel.receive())
    except EOFError:
        return
    finally:
        unwatch()
        for request_id in tuple(outbox.running):
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
