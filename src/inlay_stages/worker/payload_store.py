"""Payloads that a worker keeps for others, each until it is used or its request ends."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import (
    LEASE_LOST,
    DeadlineExceededError,
    ErrorFrame,
    InlayError,
    NotFoundError,
    OverloadedError,
)
from inlay.messages.edges import NONE_WANTED, Fetch, PayloadLease, Window
from inlay.messages.request import Emit, Output, Payload, Request, Task

HELD_BYTES = 1 << 30
"""Bytes that are kept at a time; a request that makes more ends with an error."""


SMALL_BYTES = 1 << 14
"""Bytes of a stage's payloads that go with its last output: a question for them costs more."""


class _Ask(NamedTuple):
    """A request for payloads, and what takes its answer."""

    request: Request
    fetch: Fetch
    emit: Emit

    def answer(self, payloads: tuple[Payload, ...]) -> None:
        request = self.request
        self.emit(Output(request.id, request.attempt, 0, finish_reason="stop", payloads=payloads))

    def refuse(self, error: InlayError) -> None:
        self.emit(self.request.end("error", error))


class _Holding:
    """The payloads of one request.

    Attributes:
        payloads: that are kept.
        first: number of the first of them.
        made: nothing follows.
        released: nobody reads on; it is forgotten once the engine has ended the request.
        unread: nobody reads on; what the engine makes is dropped.
        paused: the engine waits with the request.
        ask: of the one reader, which waits for what is made next.
    """

    __slots__ = (
        "ask",
        "emit",
        "first",
        "key",
        "made",
        "num_bytes",
        "paused",
        "payloads",
        "released",
        "request",
        "timer",
        "unread",
        "window",
    )

    def __init__(self, request: Request, window: Window, emit: Emit) -> None:
        self.request = request
        self.window = window
        self.emit = emit
        self.key = secrets.token_bytes(16)
        self.payloads: deque[Payload] = deque()
        self.first = 0
        self.num_bytes = 0
        self.made = self.paused = self.released = self.unread = False
        self.ask: _Ask | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        """No more may be made now."""
        return not self.made and self.window.full(len(self.payloads), self.num_bytes)

    def is_whole(self, output: Output) -> bool:
        """Return True for the only output of a stage that none begins to read before its end."""
        return (
            self.request.task is Task.STAGE
            and self.window == Window()
            and output.finish_reason == "stop"
            and not (self.first or self.payloads)
        )

    def read(self, fetch: Fetch) -> int:
        """Return how many of the payloads its reader has had; negative: some are gone."""
        return 0 if self.window.newest else fetch.start - self.first

    def free(self, start: int) -> int:
        """Forget the payloads before number `start`; return their bytes."""
        size = 0
        while self.payloads and self.first < start:
            size += len(self.payloads.popleft().data)
            self.first += 1
        self.num_bytes -= size
        return size

    def serve(self) -> int:
        """Answer the reader that waits, if there is something to say; return the bytes freed."""
        ask = self.ask
        if ask is None or not (self.made or len(self.payloads) > self.read(ask.fetch)):
            return 0
        found: list[Payload] = []
        size = 0
        for payload in islice(self.payloads, self.read(ask.fetch), None):
            if ask.fetch.window.full(len(found), size):
                break
            found.append(payload)
            size += len(payload.data)
        self.ask = None
        ask.answer(tuple(found))
        return self.supersede()

    def supersede(self) -> int:
        """Forget what is not the newest any more, or was read, if that alone counts."""
        if self.made or not self.window.newest:
            return 0
        return self.free(self.first + len(self.payloads))


class PayloadStore:
    """Keeps payloads of requests that say `hold`.

    A lease is an open request: it ends when the request is cancelled, when its frontend's
    connection ends, and with the request's deadline; the payloads are freed in the same turn of the
    event loop. One is freed before, when its reader asks for those behind it. Where more is kept
    than the request's window has room for, the engine waits with it.

    Args:
        abort: stops a request in the engine.
        pause: has the engine wait with a request, or go on with it.
        max_bytes: as `HELD_BYTES`.
    """

    def __init__(
        self,
        abort: Callable[[str], None],
        pause: Callable[[str, bool], None],
        max_bytes: int = HELD_BYTES,
    ) -> None:
        self._abort = abort
        self._pause = pause
        self._max_bytes = max_bytes
        self._by_request: dict[str, _Holding] = {}
        self._by_key: dict[bytes, _Holding] = {}
        self._asking: dict[str, _Holding] = {}
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

    @property
    def num_paused(self) -> int:
        """Requests that wait until what they have made is used."""
        return sum(holding.paused for holding in self._by_key.values())

    def keep(self, request: Request, window: Window, emit: Emit, address: Address) -> Emit:
        """Return what takes the engine's outputs of a request; the rest of them goes on to `emit`.

        Args:
            request: the request.
            window: that it `hold`s.
            emit: takes what its frontend is to hear.
            address: where other workers reach this one.
        """
        holding = _Holding(request, window, emit)
        self._by_request[request.id] = self._by_key[holding.key] = holding
        if request.deadline is not None:
            loop = asyncio.get_running_loop()
            holding.timer = loop.call_later(request.deadline, self._expire, holding)
        return lambda output: self._take(holding, address, output)

    def _take(self, holding: _Holding, address: Address, output: Output) -> None:
        if holding.key not in self._by_key:
            return  # it has ended before the engine knew
        if holding.released:
            # The engine may have come to the end of it before it was told to stop.
            if output.finish_reason is not None:
                self._forget(holding)
                holding.emit(holding.request.end("abort"))
            return
        if holding.unread:
            if output.finish_reason is not None:
                self._forget(holding)
            holding.emit(replace(output, payloads=()))
            return
        size = sum(len(payload.data) for payload in output.payloads)
        if holding.is_whole(output) and size <= SMALL_BYTES:
            self._forget(holding)
            holding.emit(output)
            return
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
        new = output.payloads and not holding.first and not holding.payloads
        self.num_bytes += size - (holding.supersede() if output.payloads else 0)
        holding.payloads += output.payloads
        holding.num_bytes += size
        lease = PayloadLease(address, holding.key) if new else None
        output = replace(output, payloads=(), lease=lease)
        reason = output.finish_reason
        if reason in ("error", "abort"):
            self._forget(holding, None if output.error is None else output.error.to_error())
        elif reason in ("stop", "length"):
            if not holding.first and not holding.payloads:
                self._forget(holding)
            else:
                holding.made = True
                output = replace(output, finish_reason=None, held=reason)
        self.num_bytes -= holding.serve()
        self._pause_if_full(holding)
        holding.emit(output)

    def answer(self, request: Request, emit: Emit) -> None:
        """Emit the payloads that a request fetches once there are some.

        Emits an error where they are not here, or their request has failed.
        """
        fetch = request.params
        if not isinstance(fetch, Fetch):
            raise TypeError(f"a request to {request.task} has parameters of {type(fetch).__name__}")
        holding = self._by_key.get(fetch.key)
        ask = _Ask(request, fetch, emit)
        if holding is not None and fetch.start == NONE_WANTED:
            self._drop(holding)
            ask.answer(())
            return
        if holding is not None and holding.window.newest and holding.ask is not None:
            # Its worker is frozen, and another reads in its place.
            late, holding.ask = holding.ask, None
            late.refuse(_lost())
        if (
            holding is None
            or holding.ask is not None
            or not 0 <= holding.read(fetch) <= len(holding.payloads)
        ):
            ask.refuse(_lost())
            return
        self._asking[request.id] = holding

        def answered(output: Output) -> None:
            del self._asking[request.id]
            emit(output)

        holding.ask = ask._replace(emit=answered)
        self.num_bytes -= holding.free(holding.first + holding.read(fetch))
        self.num_bytes -= holding.serve()
        self._pause_if_full(holding)

    def _drop(self, holding: _Holding) -> None:
        """Have a request go on without a reader, and end as one of which nothing is kept."""
        holding.unread = True
        self.num_bytes -= holding.free(holding.first + len(holding.payloads))
        waiting, holding.ask = holding.ask, None
        if waiting is not None:
            waiting.answer(())
        self._pause_if_full(holding)

    def release(self, request_id: str) -> None:
        """End a request that has made everything, or fetches; the engine ends any other, or has.

        Safe for any id.
        """
        asked = self._asking.get(request_id)
        if asked is not None and asked.ask is not None:
            ask, asked.ask = asked.ask, None
            ask.emit(ask.request.end("abort"))
        holding = self._by_request.get(request_id)
        if holding is None:
            return
        holding.released = True
        if holding.made:
            self._forget(holding)
            holding.emit(holding.request.end("abort"))

    def _pause_if_full(self, holding: _Holding) -> None:
        if holding.full != holding.paused and holding.key in self._by_key:
            holding.paused = holding.full
            if not holding.made:
                self._pause(holding.request.id, holding.paused)

    def _expire(self, holding: _Holding) -> None:
        self._end(holding, DeadlineExceededError("the deadline passed before the next stage"))
        if not holding.made:
            self._abort(holding.request.id)

    def _end(self, holding: _Holding, error: OverloadedError | DeadlineExceededError) -> None:
        self._forget(holding, error)
        request = holding.request
        holding.emit(replace(request.end("error"), error=ErrorFrame.of(error)))

    def _forget(self, holding: _Holding, error: InlayError | None = None) -> None:
        """Free what is kept, and end the reader that waits for more."""
        del self._by_key[holding.key], self._by_request[holding.request.id]
        self.num_bytes -= holding.num_bytes
        if holding.timer is not None:
            holding.timer.cancel()
        ask, holding.ask = holding.ask, None
        if ask is not None:
            ask.refuse(error or _lost())


def _lost() -> NotFoundError:
    return NotFoundError("the payload is not kept any more", code=LEASE_LOST)
