"""Inputs of a request that other workers keep: fetched from them before the engine sees it."""

import asyncio
import logging
from collections.abc import Callable

from msgspec.structs import replace

from inlay import liveness
from inlay.address import Address
from inlay.engine.api import Peers
from inlay.errors import (
    LEASE_LOST,
    DeadlineExceededError,
    EngineError,
    InlayError,
    NotFoundError,
    OverloadedError,
)
from inlay.request import Emit, Fetch, Input, Lease, Payload, Request, Task

log = logging.getLogger(__name__)


class LeasedInputs:
    """Fetches the inputs of requests.

    Args:
        peers: asks other workers.
        admit: takes a request all of whose inputs are here.

    Attributes:
        fetched: payloads that have come so far.
    """

    def __init__(self, peers: Peers, admit: Callable[[Request, Emit], None]) -> None:
        self._peers = peers
        self._admit = admit
        self._fetching: dict[str, Callable[[], None]] = {}
        self.fetched = 0

    @property
    def num_requests(self) -> int:
        """Requests whose inputs are on their way."""
        return len(self._fetching)

    def fetch(self, request: Request, emit: Emit) -> None:
        """Admit a request once its inputs are here; an error is its only output."""
        task = asyncio.create_task(self._fetch(request, emit))

        def abort() -> None:
            # The task itself cannot tell: one that is cancelled before its first step never runs.
            task.cancel()
            emit(request.end("abort"))

        self._fetching[request.id] = abort

    def abort(self, request_id: str) -> None:
        """Stop fetching for a request. Unknown ids are ignored."""
        abort = self._fetching.pop(request_id, None)
        if abort is not None:
            abort()

    async def _fetch(self, request: Request, emit: Emit) -> None:
        try:
            ready = await self._with_inputs(request)
        except InlayError as error:
            del self._fetching[request.id]
            emit(request.end("error", error))
            return
        except Exception:
            del self._fetching[request.id]
            log.exception("the inputs of request %s were not fetched", request.id)
            emit(request.end("error", EngineError("the inputs could not be fetched")))
            return
        del self._fetching[request.id]
        self._admit(ready, emit)

    async def _with_inputs(self, request: Request) -> Request:
        """Return the request with payloads for leases, and the time that is left."""
        began = liveness.now()
        places: dict[tuple[Address, bytes], list[tuple[int, Lease]]] = {}
        for at, given in enumerate(request.inputs):
            if (lease := given.value.lease) is not None:
                places.setdefault((lease.address, lease.key), []).append((at, lease))
        inputs = list(request.inputs)
        try:
            async with liveness.timeout(request.deadline or _FETCH_SECONDS):
                for (address, key), wanted in places.items():
                    indexes = tuple(lease.index for _, lease in wanted)
                    ask = Request(
                        id=request.id,
                        task=Task.FETCH,
                        prompts=(),
                        params=Fetch(key=key, indexes=indexes),
                        client=request.client,
                    )
                    found = await self._payloads(address, ask)
                    for (at, _), payload in zip(wanted, found, strict=True):
                        inputs[at] = _filled(inputs[at], payload)
                        self.fetched += 1
        except TimeoutError as error:
            raise DeadlineExceededError("the deadline passed before the inputs had come") from error
        left = request.deadline
        if left is not None:
            left = max(0.001, left - (liveness.now() - began))
        return replace(request, inputs=tuple(inputs), deadline=left)

    async def _payloads(self, address: Address, ask: Request) -> list[Payload]:
        try:
            return list(await self._peers.payloads(address, ask))
        except OverloadedError as error:
            raise NotFoundError(error.message, code=LEASE_LOST) from error


_FETCH_SECONDS = 60.0
"""Seconds for the inputs of a request that has no deadline."""


def _filled(given: Input, payload: Payload) -> Input:
    """Return a leased input with its elements. Raises `EngineError` if they are others."""
    lease = given.value
    if (payload.dtype, payload.shape) != (lease.dtype, lease.shape):
        raise EngineError(
            f"the input {given.port} is {payload.dtype} {payload.shape}; {lease.dtype} "
            f"{lease.shape} was leased"
        )
    return Input(given.port, replace(lease, data=payload.data, lease=None))


__all__ = ["LeasedInputs"]
