"""nats-py's client, with what only its private parts allow.

Tested with nats-py 2.16; `tests/transport/test_nats_client.py` says which part is missing where a
later version breaks this.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import nats.errors
from nats.aio.client import Client

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

_SHOWN_BYTES = 200
"""Of a subject that is logged."""


def cancellable(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Raise a cancellation that came while `method` ran, also where that has lost it.

    `asyncio.wait_for` of Python 3.11 loses one that comes in the same moment as its result, and the
    library one that comes while it waits for room. Who waits for the end of a task that it has
    cancelled would wait for ever.
    """

    @wraps(method)
    async def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            return await method(*args, **kwargs)
        finally:
            if task and task.cancelling() > before:
                raise asyncio.CancelledError

    return checked


class NatsClient(Client):
    """A client that outlives errors and messages it cannot read, and can be cut off at once.

    Its tasks can be cancelled at any time.
    """

    request = cancellable(Client.request)
    flush = cancellable(Client.flush)
    _flush_pending = cancellable(Client._flush_pending)
    _connect_to_server = cancellable(Client._connect_to_server)
    _process_connect_init = cancellable(Client._process_connect_init)

    async def _process_err(self, err_msg: str) -> None:
        # The library would close for good. A server that ends the connection for it does so itself,
        # and then it is tried again; one that keeps it means a single message or subscription.
        await self._error_cb(nats.errors.Error("nats: " + err_msg.strip("'")))

    async def _process_pong(self) -> None:
        # The answer to a flush that was given up would end the client's reading for good.
        if self._pongs and self._pongs[0].done():
            del self._pongs[0]
        else:
            await super()._process_pong()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        # What is raised here would end the client's reading for good, and the server lets others
        # send any bytes as subject, reply and headers.
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (nats.errors.Error, ValueError, IndexError) as error:
            log.warning(
                "a message on %r is dropped, as it cannot be read: %s",
                subject[:_SHOWN_BYTES],
                error,
            )

    def use_access(self, login: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        """Log in so from the next connection on; files of keys are read then anyway."""
        for name in ("user", "password"):
            if name in login:
                self.options[name] = login[name]
        if tls is not None:
            self.options["tls"] = tls

    def abort(self) -> None:
        """Cut the connection at once; the library waits until all is written."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    def drop_unsent(self) -> None:
        """Forget what has not left; the library would try, and end in the middle of its closing."""
        self._pending.clear()
        self._pending_data_size = 0
