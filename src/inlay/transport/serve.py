"""The worker's end of a connection to a frontend."""

import asyncio
import logging
from collections.abc import Callable

from inlay import commands
from inlay.card import Address, ModelCard
from inlay.errors import EngineError, ErrorFrame, InlayError
from inlay.request import Output
from inlay.routing import CacheEventSource, KvEvents
from inlay.transport.api import Carrier, RequestHandler
from inlay.transport.messages import (
    Answer,
    Boot,
    CacheChanged,
    Call,
    Cancel,
    Dial,
    ForgetPrompt,
    GetCache,
    Outputs,
    Ready,
    Submit,
    ToWorker,
    WatchCache,
)
from inlay.transport.pending_calls import answer_cache

log = logging.getLogger(__name__)


class _Outbox:
    """Joins the outputs of one turn of the event loop into one message.

    An output that cannot be sent ends its request with an error.

    Args:
        channel: to the frontend.
        abort: stops a request.

    Attributes:
        running: ids of the requests that have not ended.
    """

    def __init__(self, channel: Carrier[ToWorker], abort: Callable[[str], None]) -> None:
        self._channel = channel
        self._abort = abort
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
        try:
            self._channel.send(Outputs(outputs))
        except Exception:
            # Together they may be too much; alone each is sent, or fails its own request.
            for output in outputs:
                self._send_alone(output)

    def _send_alone(self, output: Output) -> None:
        try:
            self._channel.send(Outputs((output,)))
        except Exception as error:
            failed = Output(
                output.request_id,
                output.attempt,
                output.offset,
                finish_reason="error",
                error=_frame_of(error),
            )
            self._channel.send(Outputs((failed,)))
            if output.finish_reason is None:
                self._abort(output.request_id)


def _refuse_dial(address: Address, token: bytes) -> None:
    raise ValueError("a frontend asks to dial another")


async def serve(
    channel: Carrier[ToWorker],
    handler: RequestHandler,
    dial: Callable[[Address, bytes], None] = _refuse_dial,
) -> None:
    """Serve one frontend until its connection ends; then abort every request it had sent.

    The card of `handler` is announced at once, and again whenever it changes.

    Args:
        channel: the connection.
        handler: runs the requests.
        dial: connects to another frontend; raises `ValueError` where nobody may ask for it.
    """
    outbox = _Outbox(channel, handler.abort)
    calls: set[asyncio.Task[None]] = set()

    def announce(card: ModelCard) -> None:
        channel.send(Ready(card))

    def take(message: ToWorker) -> None:
        match message:
            case Submit(request):
                outbox.running.add(request.id)
                handler.submit(request, outbox.put)
            case Cancel(request_id):
                handler.abort(request_id)
            case Boot():
                raise ValueError("a worker is started once")
            case Dial(address, token):
                dial(address, token)
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
        channel.send(await _run(handler, question))
    else:
        channel.send(await answer_cache(question.number, handler))


async def _run(handler: RequestHandler, question: Call) -> Answer:
    try:
        return Answer(question.number, await handler.call(commands.decode(question.command)))
    except InlayError as error:
        return Answer(question.number, error=ErrorFrame.of(error))
    except Exception as error:
        log.exception("a command failed")
        failed = EngineError(f"the worker failed to follow it: {type(error).__name__}")
        return Answer(question.number, error=ErrorFrame.of(failed))


def _frame_of(error: Exception) -> ErrorFrame:
    if isinstance(error, InlayError):
        return ErrorFrame.of(error)
    log.error("an output could not be sent", exc_info=error)
    return ErrorFrame.of(EngineError(f"the output could not be sent: {type(error).__name__}"))
