"""Payloads that pass the client of NATS by.

Every byte goes where it belongs, however the stream is cut.
"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from inlay.errors import OverloadedError
from inlay.transport.nats.connection import Connection
from inlay.transport.nats.direct import Sink, Sorter
from tests.transport.nats_server import NatsServer

PREFIX = "inlay.x.chunk.me."

bodies = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"MSG inlay.x.chunk.me.a 1 3\r\nabc\r\n", b"\r\n", b"PING\r\n"]),
    st.builds(
        lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.integers(10_000, 700_000)
    ),
)
ours = st.tuples(st.just("ours"), bodies, st.booleans())
others = st.tuples(st.just("other"), bodies, st.booleans())
lines = st.tuples(
    st.sampled_from(
        [
            "PING\r\n",
            "PONG\r\n",
            "+OK\r\n",
            "-ERR 'no'\r\n",
            'INFO {"a": 1}\r\n',
            "MSG\r\n",
            "MSG a 1 x\r\n",
        ]
    ),
    st.just(b""),
    st.just(False),
)


class Inner(asyncio.Protocol):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.data = b""
        self.told: list[object] = []

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append(exc)

    def eof_received(self) -> None:
        self.told.append("eof")

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")


class Shelf:
    """A sink that wants every message but those that end in "unwanted"."""

    def __init__(self) -> None:
        self.placed: list[tuple[str, bytes]] = []
        self._open: dict[str, bytearray] = {}
        self.sink = Sink(PREFIX, self._place, self._placed)

    def _place(self, subject: str, size: int) -> memoryview | None:
        if subject.endswith("unwanted"):
            return None
        self._open[subject] = bytearray(size)
        return memoryview(self._open[subject])

    def _placed(self, subject: str) -> None:
        self.placed.append((subject, bytes(self._open.pop(subject))))


def feed(sorter: Sorter, data: bytes, cuts: list[int]) -> None:
    """As an event loop would, never more at a time than the next of `cuts`."""
    at = turn = 0
    while at < len(data):
        into = sorter.get_buffer(-1)
        assert isinstance(into, memoryview)
        size = min(len(into), cuts[turn % len(cuts)], len(data) - at)
        into[:size] = data[at : at + size]
        sorter.buffer_updated(size)
        at, turn = at + size, turn + 1


@given(
    subject=st.binary(min_size=1, max_size=12).filter(
        lambda subject: not set(subject) & set(b" \t\r\n")
    ),
    body=bodies,
)
def test_a_message_whose_subject_is_no_text_is_dropped_and_what_follows_is_not(
    subject: bytes, body: bytes
) -> None:
    inner, shelf = Inner(), Shelf()
    hostile = PREFIX.encode() + b"a\xff" + subject
    wire = b"MSG %s 7 %d\r\n%s\r\n" % (hostile, len(body), body)
    feed(Sorter(inner, lambda: shelf.sink), wire + b"PING\r\n", [1 << 20])
    assert inner.data == b"PING\r\n"
    assert shelf.placed == []


@given(
    items=st.lists(st.one_of(ours, others, lines), max_size=8),
    cuts=st.lists(
        st.sampled_from([1, 2, 3, 17, 4_000, 16_384, 100_000, 1 << 20]), min_size=1, max_size=4
    ).filter(lambda cuts: max(cuts) > 1000),
)
def test_every_byte_goes_where_it_belongs_however_the_stream_is_cut(
    items: list[tuple[str, bytes, bool]], cuts: list[int]
) -> None:
    wire, expected_inner, expected_placed = b"", b"", []
    for index, (kind, body, flag) in enumerate(items):
        if kind == "ours":
            subject = f"{PREFIX}{index}.{'wanted' if flag else 'unwanted'}"
            wire += f"MSG {subject} 7 {len(body)}\r\n".encode() + body + b"\r\n"
            if flag:
                expected_placed.append((subject, body))
            continue
        if kind == "other":
            # With headers, or a reply subject.
            head = (
                f"HMSG {PREFIX}h 1 {min(9, len(body))} {len(body)}"
                if flag
                else f"MSG a.b 2 reply.to {len(body)}"
            )
            part = head.encode() + b"\r\n" + body + b"\r\n"
        else:
            part = kind.encode()
        wire += part
        expected_inner += part
    inner, shelf = Inner(), Shelf()
    feed(Sorter(inner, lambda: shelf.sink), wire, cuts)
    assert inner.data == expected_inner
    assert shelf.placed == expected_placed


def test_what_the_transport_tells_is_passed_on() -> None:
    inner = Inner()
    sorter = Sorter(inner, lambda: None)
    error = OSError("cut")
    sorter.pause_writing()
    sorter.resume_writing()
    sorter.eof_received()
    sorter.connection_lost(error)
    assert inner.told == ["pause", "resume", "eof", error]


def test_without_a_sink_everything_is_handed_on() -> None:
    inner = Inner()
    wire = f"MSG {PREFIX}a 1 3\r\nabc\r\n".encode()
    feed(Sorter(inner, lambda: None), wire, [5])
    assert inner.data == wire


@pytest.mark.parametrize("direct", [True, False])
async def test_payloads_arrive_past_the_client_or_through_it(
    nats_server: NatsServer, direct: bool
) -> None:
    settings = nats_server.settings()
    receiver = Connection(settings, "receiver", direct=direct)
    sender = Connection(settings, "sender", direct=not direct)
    for connection in (receiver, sender):
        await connection.open()
    bodies = [
        bytes([index]) * size for index, size in enumerate([0, 1, 70_000, receiver.max_payload])
    ]
    shelf, other, complete = Shelf(), asyncio.Queue[bytes](), asyncio.Event()

    def placed(subject: str) -> None:
        shelf.sink.placed(subject)
        if len(shelf.placed) == len(bodies):
            complete.set()

    await receiver.receive(f"{PREFIX}*", Sink(PREFIX, shelf.sink.place, placed))
    await receiver.subscribe("last", lambda message: other.put_nowait(message.data))
    await receiver.settle()
    for index, body in enumerate(bodies):
        await sender.send(f"{PREFIX}{index}", memoryview(body))
    await sender.send(f"{PREFIX}unwanted", b"x" * 100_000)
    sender.publish("last", b"end")
    async with asyncio.timeout(30):
        assert await other.get() == b"end"
        await complete.wait()
    assert shelf.placed == [(f"{PREFIX}{index}", body) for index, body in enumerate(bodies)]
    with pytest.raises(OverloadedError):
        await sender.send(f"{PREFIX}large", bytes(receiver.max_payload + 1))
    for connection in (receiver, sender):
        await connection.close()


async def test_a_connection_is_lost_from_when_it_was_and_not_for_ever_before(
    nats_server: NatsServer,
) -> None:
    connection = Connection(nats_server.settings(), "somebody")
    await connection.open()
    # The client knows a moment before it says so.
    connection._client._status = Client.RECONNECTING
    assert not connection.connected
    assert connection.lost_for == 0
    connection._client._status = Client.CONNECTED
    await connection.close()
