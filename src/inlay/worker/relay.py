"""Offers another plane what a worker process of this machine can do."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from inlay.card import ModelCard
from inlay.errors import (
    DeadlineExceededError,
    EngineError,
    ErrorFrame,
    InlayError,
    InvalidRequestError,
    OverloadedError,
)
from inlay.outputs import coalesce
from inlay.prompt import Buffer
from inlay.request import (
    Command,
    EmbedOutput,
    EmbedRequest,
    Emit,
    EmitEmbedOutput,
    Output,
    Reply,
    Request,
)
from inlay.routing import CacheEventSource, KvEvents, KvSnapshot
from inlay.transport.api import Plane, Stream, Worker

log = logging.getLogger(__name__)

NOBODY = "the worker has no engine now"
_GUARD_SECONDS = 1.0
_CALL_SECONDS = 600.0
"""A command has the time that whoever gave it waits.

This only ends what nobody waits for any more.
"""


class Relay:
    """`inlay.transport.api.RequestHandler` around whichever worker a local plane has now.

    Args:
        plane: of one worker, which may be another after a while.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._worker: Worker | None = None
        self._announce: Callable[[ModelCard], None] | None = None
        self._tell_cache: Callable[[KvEvents], None] | None = None
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._embeddings: dict[str, asyncio.Task[None]] = {}

    def watch(self, announce: Callable[[ModelCard], None]) -> None:
        """Have `follow` tell `announce`."""
        self._announce = announce

    async def follow(self, away: Callable[[], None]) -> None:
        """Tell of the worker and its card, and `away` when it is gone, until cancelled."""
        told: ModelCard | None = None
        while True:
            worker = next(iter(self._plane.workers()), None)
            if worker is not self._worker:
                if self._worker is not None:
                    away()
                self._worker, told = worker, None
            if worker is not None and worker.card != told and self._announce is not None:
                news, told = told is None, worker.card
                self._announce(told)
                if (
                    news
                    and told.kv_events
                    and self._tell_cache is not None
                    and isinstance(worker, CacheEventSource)
                ):
                    worker.watch_cache(self._tell_cache)
            await self._plane.changed()

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None:
        """As `CacheEventSource.watch_cache`, of every worker there will be."""
        self._tell_cache = tell

    async def kv_snapshot(self) -> KvSnapshot:
        """As `CacheEventSource.kv_snapshot`.

        Raises `InvalidRequestError` where the worker tells of no cache.
        """
        if self._worker is None:
            raise OverloadedError(NOBODY, retry_after=1)
        if not isinstance(self._worker, CacheEventSource):
            raise InvalidRequestError("the worker tells of no cache")
        return await self._worker.kv_snapshot()

    async def guard(self, kill: Callable[[], object], seconds: float) -> None:
        """Call `kill` when the worker's process has not answered for `seconds` (`inlay.liveness`), until cancelled.

        Such a process stands still: its engine may take its time, what answers is another thread.
        """
        while True:
            worker = self._worker
            if worker is not None:
                try:
                    await worker.call(Command("stats"), seconds)
                except DeadlineExceededError:
                    log.error(
                        "the worker's process has not answered for %g s: it is killed", seconds
                    )
                    kill()
                except OverloadedError as error:
                    log.debug("nothing to guard: %s", error.message)
            await asyncio.sleep(_GUARD_SECONDS)

    def generate(self, request: Request, emit: Emit) -> None:
        """As `GenerateEngine.generate`; what is refused is an output too."""
        try:
            if self._worker is None:
                raise OverloadedError(NOBODY, retry_after=1)
            stream = self._worker.send(request)
        except InlayError as error:
            emit(_failed(request, len(request.prior_output), error))
            return
        self._streams[request.id] = stream
        self._run(self._pass_on(request, stream, emit))

    async def _pass_on(self, request: Request, stream: Stream, emit: Emit) -> None:
        offset = len(request.prior_output)
        try:
            async for outputs in stream:
                # What waited together crosses the network together: a piece of a stream costs as
                # much with one id as with a hundred.
                for output in coalesce(outputs):
                    offset = output.offset + len(output.token_ids)
                    emit(output)
        except InlayError as error:
            emit(_failed(request, offset, error))
        except Exception:
            # Whoever waits must hear of it; the log keeps the trace.
            log.exception("the answer to %s was not passed on", request.id)
            emit(_failed(request, offset, EngineError("the worker failed to pass the answer on")))
        finally:
            self._streams.pop(request.id, None)

    def embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        """As `EmbeddingEngine.embed`; what is refused is an answer too."""
        task = self._run(self._embed(request, emit))
        self._embeddings[request.id] = task
        task.add_done_callback(lambda _: self._embeddings.pop(request.id, None))

    async def _embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        try:
            if self._worker is None:
                raise OverloadedError(NOBODY, retry_after=1)
            emit(await self._worker.embed(request))
        except InlayError as error:
            emit(_no_vectors(request, error))
        except asyncio.CancelledError:
            emit(_no_vectors(request, OverloadedError("the request was given up")))
            raise

    def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()
        elif request_id in self._embeddings:
            self._embeddings[request_id].cancel()

    async def call(self, command: Command) -> Reply:
        """Run a command; failures are a `Reply` with an error."""
        try:
            if self._worker is None:
                raise OverloadedError(NOBODY, retry_after=1)
            return await self._worker.call(command, _CALL_SECONDS)
        except InlayError as error:
            return Reply(error=ErrorFrame.of(error))

    def _run(self, doing: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _failed(request: Request, offset: int, error: InlayError) -> Output:
    return Output(
        request.id, request.attempt, offset, finish_reason="error", error=ErrorFrame.of(error)
    )


def _no_vectors(request: EmbedRequest, error: InlayError) -> EmbedOutput:
    return EmbedOutput(request.id, request.attempt, Buffer(b""), error=ErrorFrame.of(error))
