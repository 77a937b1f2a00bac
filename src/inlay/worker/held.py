"""Payloads that a worker keeps for others, each until the request that made it ends."""

import asyncio
import secrets
from collections.abc import Callable

from msgspec.structs import replace

from inlay.address import Address
from inlay.errors import (
    LEASE_LOST,
    DeadlineExceededError,
    ErrorFrame,
    NotFoundError,
    OverloadedError,
)
from inlay.prompt import Buffer
from inlay.request import Emit, Fetch, Lease, Output, Payload, Request

HELD_BYTES = 1 << 30
"""Bytes that are kept at a time; a request that makes more ends with an error."""

_NOTHING = Buffer(b"")


class _Holding:
    """The payloads of one request.

    Attributes:
        made: all of it is here.
    """

    __slots__ = ("emit", "key", "made", "num_bytes", "payloads", "request", "timer")

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request = request
        self.emit = emit
        self.key = secrets.token_bytes(16)
        self.payloads: list[Payload] = []
        self.num_bytes = 0
        self.made = False
        self.timer: asyncio.TimerHandle | None = None


class HeldPayloads:
    """Keeps payloads of requests that say `hold`.

    A lease is an open request: it ends when the request is cancelled, when its frontend's
    connection ends, and with the request's deadline; the payloads are freed in the same turn of the
    event loop. They may be fetched any number of times before.

    Args:
        abort: stops a request in the engine.
        max_bytes: as `HELD_BYTES`.
    """

    def __init__(self, abort: Callable[[str], None], max_bytes: int = HELD_BYTES) -> None:
        self._abort = abort
        self._max_bytes = max_bytes
        self._by_request: dict[str, _Holding] = {}
        self._by_key: dict[bytes, _Holding] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of payloads."""
        return sum(len(holding.payloads) for holding in self._by_key.values())

    @property
    def num_leases(self) -> int:
        """Requests of which payloads are kept."""
        return sum(bool(holding.payloads) for holding in self._by_key.values())

    @property
    def num_made(self) -> int:
        """Requests that have made everything and are still open."""
        return sum(holding.made for holding in self._by_key.values())

    def keep(self, request: Request, emit: Emit, address: Address) -> Emit:
        """Return what takes the engine's outputs of a request; leases go on to `emit`.

        Args:
            request: says `hold`.
            emit: takes what its frontend is to hear.
            address: where other workers reach this one.
        """
        holding = _Holding(request, emit)
        self._by_request[request.id] = self._by_key[holding.key] = holding
        if request.deadline is not None:
            loop = asyncio.get_running_loop()
            holding.timer = loop.call_later(request.deadline, self._expire, holding)
        return lambda output: self._take(holding, address, output)

    def _take(self, holding: _Holding, address: Address, output: Output) -> None:
        if holding.key not in self._by_key:
            return  # it has ended before the engine knew
        size = sum(len(payload.data) for payload in output.payloads)
        if self.num_bytes + size > self._max_bytes:
            self._end(
                holding,
                OverloadedError(
                    f"{self.num_bytes} bytes are kept for other stages; {size} more would pass the "
                    f"limit of {self._max_bytes}",
                    retry_after=1,
                ),
            )
            if output.finish_reason is None:
                self._abort(holding.request.id)
            return
        leased = []
        for payload in output.payloads:
            lease = Lease(address, holding.key, len(holding.payloads))
            holding.payloads.append(payload)
            leased.append(replace(payload, data=_NOTHING, lease=lease))
        holding.num_bytes += size
        self.num_bytes += size
        output = replace(output, payloads=tuple(leased))
        if output.finish_reason in ("error", "abort") or (
            output.finish_reason is not None and not holding.payloads
        ):
            self._forget(holding)
        elif output.finish_reason is not None:
            holding.made = True
            output = replace(output, finish_reason=None, held=True)
        holding.emit(output)

    def answer(self, request: Request, emit: Emit) -> None:
        """Emit the payloads that a request fetches, or an error where they are not here."""
        fetch = request.params
        if not isinstance(fetch, Fetch):
            raise TypeError(f"a request to {request.task} has parameters of {type(fetch).__name__}")
        holding = self._by_key.get(fetch.key)
        found = [] if holding is None else holding.payloads
        if not all(0 <= index < len(found) for index in fetch.indexes):
            lost = NotFoundError("the payload is not kept any more", code=LEASE_LOST)
            emit(request.end("error", lost))
            return
        payloads = tuple(found[index] for index in fetch.indexes)
        emit(Output(request.id, request.attempt, 0, finish_reason="stop", payloads=payloads))

    def release(self, request_id: str) -> None:
        """End a request that has made everything; the engine ends any other. Safe for any id."""
        holding = self._by_request.get(request_id)
        if holding is not None and holding.made:
            self._forget(holding)
            holding.emit(holding.request.end("abort"))

    def _expire(self, holding: _Holding) -> None:
        self._end(holding, DeadlineExceededError("the deadline passed before the next stage"))
        if not holding.made:
            self._abort(holding.request.id)

    def _end(self, holding: _Holding, error: OverloadedError | DeadlineExceededError) -> None:
        self._forget(holding)
        request = holding.request
        holding.emit(replace(request.end("error"), error=ErrorFrame.of(error)))

    def _forget(self, holding: _Holding) -> None:
        del self._by_key[holding.key], self._by_request[holding.request.id]
        self.num_bytes -= holding.num_bytes
        if holding.timer is not None:
            holding.timer.cancel()


__all__ = ["HELD_BYTES", "HeldPayloads"]
