"""The private parts of nats-py that `inlay.transport.nats.client` uses are there."""

import inspect

from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol import parser

from inlay.transport.nats.client import NatsClient


def test_a_message_is_taken_by_the_method_that_is_overridden() -> None:
    theirs = inspect.signature(Client._process_msg)
    assert list(theirs.parameters) == list(inspect.signature(NatsClient._process_msg).parameters)
    assert "self.nc._process_msg(" in inspect.getsource(parser)


def test_a_connection_can_be_cut_and_what_is_unsent_forgotten() -> None:
    client = NatsClient()
    assert isinstance(client._pending, list)
    assert client._pending_data_size == 0
    assert "self._io_writer" in inspect.getsource(TcpTransport)
    client._pending.append(b"unsent")
    client.drop_unsent()
    assert client._pending == []
