"""nats-py's client, with the three things that only its private parts allow.

Tested with nats-py 2.16; `tests/transport/test_nats_client.py` says which part is missing where a
later version breaks this.
"""

import logging

import nats.errors
from nats.aio.client import Client

log = logging.getLogger(__name__)

_SHOWN_BYTES = 200
"""Of a subject that is logged."""


class NatsClient(Client):
    """A client that outlives messages it cannot read, and can be cut off at once."""

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

    def abort(self) -> None:
        """Cut the connection at once; the library waits until all is written."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    def drop_unsent(self) -> None:
        """Forget what has not left; the library would try, and end in the middle of its closing."""
        self._pending.clear()
        self._pending_data_size = 0
