"""More large messages at once than their receiver keeps memory for: all of them arrive, in turn."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

import pytest

from inlay.errors import OverloadedError
from inlay.plane.nats import transfers as module
from inlay.plane.nats.connection import Connection
from inlay.plane.nats.subjects import Subjects
from inlay.plane.nats.transfers import Credit, Notice, Outbound, Transfers
from inlay.prompt import Buffer
from tests.plane.nats_server import NatsServer

KIB = 1024
MEMORY = 64 * KIB


class Pair:
    """A sender and a receiver whose chunks cross a NATS server; notices go from one to the other as they are."""

    def __init__(self, sender: Connection, receiver: Connection, subjects: Subjects) -> None:
        self.arrived: dict[bytes, bytes] = {}
        self.sizes: dict[int, int] = {}
        self.begun: list[int] = []
        self.most_held = 0
        self._loop = asyncio.get_running_loop()
        self._under_way: set[int] = set()
        self.sender = Transfers(sender, subjects, "sender", tell=self._to_receiver, deliver=self._deliver)
        self.receiver = Transfers(receiver, subjects, "receiver", tell=self._to_sender, deliver=self._deliver)

    def _to_receiver(self, _: str, notice: Notice) -> None:
        self._loop.call_soon(self.receiver.hear, "sender", notice)

    def _to_sender(self, _: str, notice: Notice) -> None:
        if not isinstance(notice, Credit):
            self._under_way.discard(notice.transfer)
        elif notice.chunks and notice.transfer not in self.begun:
            self.begun.append(notice.transfer)
            self._under_way.add(notice.transfer)
            self.most_held = max(self.most_held, sum(self.sizes[number] for number in self._under_way))
        self._loop.call_soon(self.sender.hear, "receiver", notice)

    def _deliver(self, _: str, header: memoryview, buffers: list[Buffer]) -> None:
        self.arrived[bytes(header)] = b"".join(bytes(buffer.view) for buffer in buffers)

    def offer(self, header: bytes, body: bytes) -> Outbound:
        outbound = self.sender.offer("receiver", header, [Buffer(memoryview(body))])
        self.sizes[outbound.number] = len(header) + len(body)
        return outbound


@pytest.fixture
async def pair(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(module, "CHUNK_BYTES", KIB)
    monkeypatch.setattr(module, "WINDOW_BYTES", 8 * KIB)
    monkeypatch.setattr(module, "MEMORY_BYTES", MEMORY)
    namespace = f"transfers-{uuid4().hex[:8]}"
    settings = nats_server.settings(namespace)
    sender, receiver = Connection(settings, "sender"), Connection(settings, "receiver", direct=True)
    for connection in (sender, receiver):
        await connection.open()
    pair = Pair(sender, receiver, Subjects(namespace))
    await pair.receiver.open()
    await receiver.settle()
    yield pair
    await pair.sender.close()
    for connection in (sender, receiver):
        await connection.close()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([15] * 20, id="equal"),
        pytest.param([15, 15, 15, 63, *[2] * 20], id="a large one between small ones"),
        pytest.param([63, 63, 1, 63, 1], id="one at a time"),
    ],
)
async def test_more_than_the_memory_arrives_and_begins_in_the_order_it_came(
    pair: Pair, sizes: Sequence[int]
) -> None:
    bodies = {b"%d" % index: random.Random(index).randbytes(size * KIB) for index, size in enumerate(sizes)}
    outbounds = [pair.offer(header, body) for header, body in bodies.items()]
    async with asyncio.timeout(60):
        await asyncio.gather(*(outbound.done for outbound in outbounds))
    assert pair.arrived == bodies
    assert pair.begun == [outbound.number for outbound in outbounds]
    assert max(pair.sizes.values()) <= pair.most_held <= MEMORY


async def test_what_is_withdrawn_while_it_waits_for_memory_lets_the_others_pass(pair: Pair) -> None:
    first, large, last = (pair.offer(b"%d" % size, bytes(size * KIB)) for size in (40, 60, 20))
    pair.sender.withdraw(large)
    async with asyncio.timeout(60):
        await asyncio.gather(first.done, last.done)
        with pytest.raises(OverloadedError, match="withdrawn"):
            await large.done
    assert set(pair.arrived) == {b"40", b"20"}
    assert pair.begun == [first.number, last.number]
