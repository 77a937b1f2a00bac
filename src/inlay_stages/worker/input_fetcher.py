"""Inputs of a request that other workers keep: fetched before the engine runs, or while it does."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from inlay.base import liveness
from inlay.base.errors import (
    LEASE_LOST,
    DeadlineExceededError,
    EngineError,
    InlayError,
    NotFoundError,
    OverloadedError,
)
from inlay.engine.api import PeerWorkers
from inlay.messages.edges import Fetch, Window
from inlay.messages.request import Emit, Input, Output, Payload, Request, Task
from inlay_stages.feeds import Feed, renamed
from inlay_stages.worker.input_stream import InputStream

log = logging.getLogger(__name__)


class Admit(Protocol):
    """Takes a request whose inputs are here, or come by an inflow."""

    def __call__(
        self, request: Request, emit: Emit, inflow: InputStream | None = None, /
    ) -> None: ...


class InputFetcher:
    """Fetches the inputs of requests."""

    def __init__(self, peers: PeerWorkers, admit: Admit) -> None:
        self._peers = peers
        self._admit = admit
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, Callable[[], None]] = {}
        self.fetched = 0

    @property
    def num_requests(self) -> int:
        """Requests whose inputs are on their way."""
        return len(self._fetching)

    def fetch(self, request: Request, emit: Emit) -> None:
        """Admit a request once all of its whole edges is here; its streams come while it runs.

        Where those cannot come, an error is its only output.
        """
        self._waiting[request.id] = lambda: emit(request.end("abort"))
        task = self._fetching[request.id] = asyncio.create_task(self._fetch(request, emit))
        task.add_done_callback(lambda _: self._fetching.pop(request.id, None))

    def abort(self, request_id: str) -> None:
        """Stop fetching for a request that is not admitted yet. Unknown ids are ignored."""
        end = self._waiting.pop(request_id, None)
        if end is not None:
            # The task itself cannot tell: one that is cancelled before its first step never runs.
            self._fetching[request_id].cancel()
            end()

    async def _fetch(self, request: Request, emit: Emit) -> None:
        began = liveness.now()
        inputs = list(request.inputs)
        try:
            async with liveness.timeout(request.deadline or _FETCH_SECONDS):
                for feed in request.feeds:
                    if feed.window is None:
                        inputs += _inputs(feed, await self._ask(request, feed, 0, Window()))
        except TimeoutError:
            late = DeadlineExceededError("the deadline passed before the inputs had come")
            self._refuse(request, emit, late)
            return
        except InlayError as error:
            self._refuse(request, emit, error)
            return
        except Exception:
            log.exception("the inputs of request %s were not fetched", request.id)
            self._refuse(request, emit, EngineError("the inputs could not be fetched"))
            return
        del self._waiting[request.id]
        left = request.deadline
        if left is not None:
            left = max(0.001, left - (liveness.now() - began))
        ready = replace(request, inputs=tuple(inputs), feeds=(), deadline=left)
        streams = [(feed, feed.window) for feed in request.feeds if feed.window is not None]
        if not streams:
            self._admit(ready, emit)
            return
        inflow = InputStream(inputs, len(streams))
        self._admit(ready, _until_end(emit, self._fetching[request.id], inflow), inflow)
        await asyncio.gather(*(self._follow(request, *stream, inflow) for stream in streams))

    def _refuse(self, request: Request, emit: Emit, error: InlayError) -> None:
        if self._waiting.pop(request.id, None) is not None:
            emit(request.end("error", error))

    async def _follow(
        self, request: Request, feed: Feed, window: Window, inflow: InputStream
    ) -> None:
        """Fetch as much as there is room for, until nothing follows."""
        at = 0
        try:
            while found := await self._ask(request, feed, at, await inflow.room(window)):
                inflow.put(_inputs(feed, found))
                if not window.newest:
                    at += len(found)
                elif found[-1].last:
                    break
            inflow.end()
        except InlayError as error:
            inflow.end(error)
        except Exception:
            log.exception("the inputs of request %s were not fetched", request.id)
            inflow.end(EngineError("the inputs could not be fetched"))

    async def _ask(self, request: Request, feed: Feed, start: int, window: Window) -> list[Payload]:
        ask = Request(
            # One worker may make several feeds of a request.
            id=f"{request.id}-{feed.lease.key.hex()}",
            task=Task.FETCH,
            prompts=(),
            params=Fetch(key=feed.lease.key, start=start, window=window),
            client=request.client,
        )
        try:
            found = list(await self._peers.payloads(feed.lease.address, ask))
        except OverloadedError as error:
            raise NotFoundError(error.message, code=LEASE_LOST) from error
        self.fetched += len(found)
        return found


_FETCH_SECONDS = 60.0
"""Seconds for the inputs of a request that has no deadline."""


def _inputs(feed: Feed, payloads: list[Payload]) -> list[Input]:
    """Return those that are of ports that are fed."""
    named = ((renamed(payload.port, feed.ports), payload) for payload in payloads)
    return [Input(port, payload) for port, payload in named if port is not None]


def _until_end(emit: Emit, following: "asyncio.Task[None]", inflow: InputStream) -> Emit:
    """Return `emit` that stops fetching where the request has failed, and drops what else comes."""

    def take(output: Output) -> None:
        if output.finish_reason in ("stop", "length"):
            inflow.drain()
        elif output.finish_reason is not None:
            following.cancel()
        emit(output)

    return take
