"""The worker's end of a connection to a frontend."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from inlay.base.errors import EngineError, ErrorFrame, InlayError
from inlay.messages import commands
from inlay.messages.card import Address, ModelCard
from inlay.messages.outputs import coalesce
from inlay.messages.request import Output, PageQuery, Request
from inlay.messages.routing import CacheEventSource, KvEvents
from inlay.transport.api import FrameTransport, RequestHandler
from inlay.transport.messages import (
    Boot,
    CacheChanged,
    Cancel,
    CommandCall,
    Dial,
    ForgetPrompt,
    GetCache,
    Outputs,
    Ready,
    ReplyFrame,
    SettledReference,
    Submit,
    ToWorker,
    WatchCache,
)
from inlay.transport.pending_calls import answer_cache
from inlay.transport.wire import CHUNK_BYTES

log = logging.getLogger(__name__)


MAX_UNSENT_BYTES = 64 * 1024
"""Bytes of earlier messages that may wait to leave when outputs are sent."""
_RETRY_SECONDS = 0.005
_COALESCE_FROM = 256
"""Outputs that wait before they are joined."""


class _Waiting:
    """Outputs that wait; many of them are joined, those of each request."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self._coalesce_at = _COALESCE_FROM

    def coalesce(self) -> None:
        """Join them, if they are many."""
        if len(self.outputs) < self._coalesce_at:
            return
        by_request: dict[str, list[Output]] = {}
        for output in self.outputs:
            by_request.setdefault(output.request_id, []).append(output)
        self.outputs = [one for outputs in by_request.values() for one in coalesce(outputs)]
        # What cannot be joined is not looked at again each time.
        self._coalesce_at = max(_COALESCE_FROM, 2 * len(self.outputs))

    def take(self) -> tuple[Output, ...]:
        """Return all of them, which wait no more."""
        outputs, self.outputs = tuple(self.outputs), []
        self._coalesce_at = _COALESCE_FROM
        return outputs


def _messages(outputs: tuple[Output, ...]) -> Sequence[Sequence[Output]]:
    """Divide outputs: tokens, those with more beside them, and each that is large by itself.

    A large message may wait for memory of the frontend, and tokens of others are not to wait with
    it. Those of a request keep their order. What is not large stays together: a message that is
    not, and so waits for nothing, delays the next ones.
    """
    for output in outputs:
        if output.payloads or output.prompt_logprobs is not None:
            break
    else:
        return (outputs,)
    ranks: dict[str, int] = {}
    found: list[list[Output]] = [[], []]
    for output in outputs:
        size = sum(len(payload.data) for payload in output.payloads)
        more = size > 0 or output.prompt_logprobs is not None
        rank = max(ranks.get(output.request_id, 0), more + (size > CHUNK_BYTES))
        ranks[output.request_id] = rank
        if rank < 2:
            found[rank].append(output)
        else:
            found.append([output])
    return found


class Outbox:
    """Joins the outputs of one turn of the event loop into few messages.

    While the frontend does not keep up, outputs wait here, and those of a request become one: what
    a fast engine makes for one client delays the others by few bytes. A large message gives way to
    others: what follows of its requests waits until it has left, or it would come before. An output
    that cannot be sent ends its request with an error.

    Attributes:
        running: ids of the requests that have not ended.
    """

    def __init__(self, channel: FrameTransport[ToWorker], abort: Callable[[str], None]) -> None:
        self._channel = channel
        self._abort = abort
        self._next = _Waiting()
        self._behind = _Waiting()
        self._leaving: set[str] = set()
        """Ids of the requests of large messages that have not left."""
        self._is_due = False
        self._closed = False
        self.running: set[str] = set()

    def put(self, output: Output) -> None:
        """Send an output with the others of this turn."""
        if output.finish_reason is not None:
            self.running.discard(output.request_id)
        if output.request_id in self._leaving:
            self._behind.outputs.append(output)
            self._behind.coalesce()
            return
        self._next.outputs.append(output)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """Send nothing more: the connection has ended."""
        self._closed = True

    def _flush(self) -> None:
        if self._closed:
            return
        if self._channel.unsent_bytes > MAX_UNSENT_BYTES:
            self._next.coalesce()
            asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._flush)
            return
        self._is_due = False
        if len(self._next.outputs) > len(self.running):
            self._next.coalesce()
        for message in _messages(self._next.take()):
            # What becomes large now does not leave before the turn ends: none of `_behind` is sent
            # in between.
            outputs = self._not_behind(message)
            try:
                self._send(outputs)
            except Exception:
                # Together they may be too much; alone each is sent, or fails its own request.
                for output in outputs:
                    self._send_alone(output)

    def _not_behind(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """Return the outputs that need not wait; the others do from now on."""
        if not self._leaving:
            return outputs
        self._behind.outputs += [each for each in outputs if each.request_id in self._leaving]
        self._behind.coalesce()
        return [each for each in outputs if each.request_id not in self._leaving]

    def _send(self, outputs: Sequence[Output]) -> None:
        if not outputs:
            return
        sent = self._channel.send(Outputs(tuple(outputs)))
        if self._channel.when_left(sent, lambda: self._on_left(outputs)):
            self._leaving.update(output.request_id for output in outputs)

    def _on_left(self, outputs: Sequence[Output]) -> None:
        self._leaving.difference_update(output.request_id for output in outputs)
        for output in self._behind.take():
            self.put(output)

    def _send_alone(self, output: Output) -> None:
        try:
            self._send(self._not_behind([output]))
        except Exception as error:
            failed = Output(
                output.request_id,
                output.attempt,
                output.offset,
                finish_reason="error",
                error=_frame_of(error),
            )
            self._send([failed])
            if output.finish_reason is None:
                self._abort(output.request_id)


def _refuse_dial(address: Address, token: bytes) -> None:
    raise ValueError("a frontend asks to dial another")


def _refuse_answer(answer: SettledReference) -> None:
    raise ValueError("a frontend answers what it was not asked")


async def serve(
    channel: FrameTransport[ToWorker],
    handler: RequestHandler,
    dial: Callable[[Address, bytes], None] = _refuse_dial,
    settled: Callable[[SettledReference], None] = _refuse_answer,
) -> None:
    """Serve one frontend until its connection ends; then abort every request it had sent.

    The card of `handler` is announced at once, and again whenever it changes.

    Args:
        channel: the connection.
        handler: runs the requests.
        dial: connects to another frontend; raises `ValueError` where nobody may ask for it.
        settled: takes an answer about references; likewise, where nothing was asked.
    """
    outbox = Outbox(channel, handler.abort)
    calls: set[asyncio.Task[None]] = set()

    def announce(card: ModelCard) -> None:
        channel.send(Ready(card))

    def take(message: ToWorker) -> None:
        match message:
            case Submit(request, into):
                memory = None if into is None else channel.reply_memory(into)
                outbox.running.add(request.id)
                handler.submit(_answered_in(request, memory), outbox.put)
            case Cancel(request_id):
                handler.abort(request_id)
            case Boot():
                raise ValueError("a worker is started once")
            case SettledReference() as answer:
                settled(answer)
            case Dial(address, token):
                dial(address, token)
            case ForgetPrompt(key):
                handler.forget_prompt(key)
            case WatchCache():
                _watch_cache(channel, handler)
            case (CommandCall() | GetCache()) as question:
                task = asyncio.create_task(_answer(channel, handler, question))
                calls.add(task)
                task.add_done_callback(calls.discard)

    unwatch = handler.watch(announce)
    try:
        await channel.deliver(take)
    except EOFError:
        return
    finally:
        unwatch()
        outbox.close()
        for request_id in tuple(outbox.running):
            handler.abort(request_id)
        for task in calls:
            task.cancel()


def _answered_in(request: Request, memory: memoryview | None) -> Request:
    """Have pages be written to memory that was lent here, and to no other."""
    params = request.params
    if not isinstance(params, PageQuery) or params.into is memory:
        return request
    return replace(request, params=replace(params, into=memory))


def _watch_cache(channel: FrameTransport[ToWorker], handler: RequestHandler) -> None:
    def told(events: KvEvents) -> None:
        channel.send(CacheChanged(events))

    if isinstance(handler, CacheEventSource):
        handler.watch_cache(told)


async def _answer(
    channel: FrameTransport[ToWorker], handler: RequestHandler, question: CommandCall | GetCache
) -> None:
    if isinstance(question, CommandCall):
        channel.send(await _run(handler, question))
    else:
        channel.send(await answer_cache(question.number, handler))


async def _run(handler: RequestHandler, question: CommandCall) -> ReplyFrame:
    try:
        return ReplyFrame(question.number, await handler.call(commands.decode(question.command)))
    except InlayError as error:
        return ReplyFrame(question.number, error=ErrorFrame.of(error))
    except Exception as error:
        log.exception("a command failed")
        failed = EngineError(f"the worker failed to follow it: {type(error).__name__}")
        return ReplyFrame(question.number, error=ErrorFrame.of(failed))


def _frame_of(error: Exception) -> ErrorFrame:
    if isinstance(error, InlayError):
        return ErrorFrame.of(error)
    log.error("an output could not be sent", exc_info=error)
    return ErrorFrame.of(EngineError(f"the output could not be sent: {type(error).__name__}"))
