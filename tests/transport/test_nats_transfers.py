"""Large messages: more at once than their receiver keeps memory for, and those of which it has a part."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import OverloadedError
from inlay.prompt import Buffer
from inlay.transport.nats import transfers as module
from inlay.transport.nats.connection import Connection
from inlay.transport.nats.embeds_cache import EmbedsCache
from inlay.transport.nats.notices import (
    PART_BYTES,
    Credit,
    Dropped,
    Named,
    Notice,
    Offer,
    Taken,
    Withdrawn,
)
from inlay.transport.nats.outbound import Outbound
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.subjects import Subjects
from inlay.transport.nats.transfers import Transfers
from tests.transport.nats_server import NatsServer

KIB = 1024
MEMORY = 64 * KIB


class OldOffer(msgspec.Struct, frozen=True, tag="offer", array_like=True):
    transfer: int
    sizes: tuple[int, ...]
    chunk: int


class OldCredit(msgspec.Struct, frozen=True, tag="credit", array_like=True):
    transfer: int
    chunks: int


OldNotice: TypeAlias = OldOffer | OldCredit | Taken | Dropped | Withdrawn


def as_before(notice: Notice) -> Notice:
    """What is left of a notice where one of the two is of the version that did not know of names."""
    seen: OldNotice = msgspec.msgpack.decode(msgspec.msgpack.encode(notice), type=OldNotice)
    left: Notice = msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=Notice)
    return left


class Pair:
    """A sender and a receiver whose chunks cross a NATS server.

    Notices go from one to the other by `wire`.

    Attributes:
        offered: numbers of the transfers, in the order of their offers.
        kept: what the receiver keeps.
    """

    wire: Callable[[Notice], Notice] = staticmethod(lambda notice: notice)

    def __init__(self, sender: Connection, receiver: Connection, subjects: Subjects) -> None:
        self.arrived: dict[bytes, bytes] = {}
        self.sizes: dict[int, int] = {}
        self.begun: list[int] = []
        self.most_held = 0
        self.offered: list[int] = []
        self.chunks = 0
        self.kept = EmbedsCache(1 << 20)
        self._loop = asyncio.get_running_loop()
        self._under_way: set[int] = set()
        self.sender = Transfers(
            sender, subjects, "sender", tell=self._to_receiver, deliver=self._deliver
        )
        self.receiver = Transfers(
            receiver,
            subjects,
            "receiver",
            tell=self._to_sender,
            deliver=self._deliver,
            kept=self.kept,
        )
        placed = self.receiver._placed

        def counted(subject: str) -> None:
            self.chunks += 1
            placed(subject)

        self.receiver._placed = counted  # type: ignore[method-assign]

    def _to_receiver(self, _: str, notice: Notice) -> None:
        if isinstance(notice, Offer):
            self.offered.append(notice.transfer)
        self._loop.call_soon(self.receiver.hear, "sender", self.wire(notice))

    def _to_sender(self, _: str, notice: Notice) -> None:
        if not isinstance(notice, Credit):
            self._under_way.discard(notice.transfer)
        elif notice.chunks and notice.transfer not in self.begun:
            self.begun.append(notice.transfer)
            self._under_way.add(notice.transfer)
            self.most_held = max(
                self.most_held, sum(self.sizes[number] for number in self._under_way)
            )
        self._loop.call_soon(self.sender.hear, "receiver", self.wire(notice))

    def _deliver(self, _: str, header: memoryview, buffers: list[Buffer]) -> None:
        self.arrived[bytes(header)] = b"".join(bytes(buffer.view) for buffer in buffers)

    def offer(self, header: bytes, body: bytes, name: str = "") -> Outbound:
        outbound = self.sender.offer("receiver", header, [Buffer(memoryview(body), name)])
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
    bodies = {
        b"%d" % index: random.Random(index).randbytes(size * KIB)
        for index, size in enumerate(sizes)
    }
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


async def arrived(*outbounds: Outbound) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*(outbound.done for outbound in outbounds))


async def test_what_is_there_passes_those_that_wait_for_memory(pair: Pair) -> None:
    body = random.Random(1).randbytes(20 * KIB)
    await arrived(pair.offer(b"first", body, "prompt/a"))
    large = [pair.offer(b"large %d" % index, bytes(60 * KIB)) for index in range(3)]
    again = pair.offer(b"again", body, "prompt/a")
    async with asyncio.timeout(60):
        ended, _ = await asyncio.wait(
            [outbound.done for outbound in (*large, again)], return_when=asyncio.FIRST_COMPLETED
        )
    assert ended == {again.done}
    await arrived(*large, again)
    assert pair.arrived[b"again"] == body


async def test_it_is_sent_again_where_it_is_not_kept_or_is_another_of_that_name(pair: Pair) -> None:
    body = random.Random(1).randbytes(20 * KIB)
    await arrived(pair.offer(b"first", body, "prompt/a"))
    pair.chunks = 0
    await arrived(pair.offer(b"second", body, "prompt/a"))
    assert pair.chunks == 0
    pair.kept.clear()
    await arrived(pair.offer(b"third", body, "prompt/a"))
    assert pair.chunks == 20
    await arrived(pair.offer(b"of another size", body * 2, "prompt/a"))
    assert pair.chunks == 60
    assert pair.arrived == {
        b"first": body,
        b"second": body,
        b"third": body,
        b"of another size": body * 2,
    }


async def test_when_the_one_that_goes_first_is_withdrawn_another_of_the_same_content_goes(
    pair: Pair,
) -> None:
    body = random.Random(1).randbytes(40 * KIB)
    outbounds = [pair.offer(b"%d" % index, body, "prompt/a") for index in range(5)]
    while not pair.offered:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert pair.offered == [outbounds[0].number]
    pair.sender.withdraw(outbounds[0])
    pair.sender.withdraw(outbounds[3])
    await arrived(*outbounds[1:3], outbounds[4])
    assert set(pair.arrived) == {b"1", b"2", b"4"}
    assert set(pair.arrived.values()) == {body}
    assert pair.offered[1] == outbounds[1].number


async def test_messages_that_share_parts_crosswise_do_not_wait_for_each_other(pair: Pair) -> None:
    one, other = [
        Buffer(random.Random(seed).randbytes(20 * KIB), f"prompt/{seed}") for seed in range(2)
    ]
    outbounds = [
        pair.sender.offer("receiver", b"%d" % index, buffers)
        for index, buffers in enumerate(([one, other], [other, one], [other], [one], [one, one]))
    ]
    for outbound in outbounds:
        pair.sizes[outbound.number] = 0
    await arrived(*outbounds)
    first, second = bytes(one.view), bytes(other.view)
    assert [pair.arrived[b"%d" % index] for index in range(5)] == [
        first + second,
        second + first,
        second,
        first,
        first + first,
    ]
    assert pair.chunks == 40


async def test_one_that_knows_of_no_names_sends_and_is_sent_everything(pair: Pair) -> None:
    pair.wire = as_before
    body = random.Random(1).randbytes(20 * KIB)
    outbounds = [pair.offer(b"%d" % index, body, "prompt/a") for index in range(3)]
    await arrived(*outbounds)
    assert pair.arrived == {b"0": body, b"1": body, b"2": body}
    # Their headers came as chunks too.
    assert pair.chunks == 3 * 21


async def test_a_header_that_no_offer_has_room_for_comes_by_itself(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", 400 * KIB)
    header = random.Random(1).randbytes(300 * KIB)
    body = random.Random(2).randbytes(20 * KIB)
    for _ in range(2):
        await arrived(pair.offer(header, body, "prompt/a"))
        assert pair.arrived == {header: body}
    assert pair.chunks == 300 + 20 + 300


async def test_one_that_is_withdrawn_while_another_brings_its_buffer_leaves_that_in_charge(
    pair: Pair,
) -> None:
    body = random.Random(1).randbytes(40 * KIB)
    first, second = (pair.offer(b"%d" % index, body, "prompt/a") for index in range(2))
    while not pair.begun:  # noqa: ASYNC110
        await asyncio.sleep(0)
    pair.sender.withdraw(second)
    while second.number in pair.sender._out:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not first.done.done()
    third = pair.offer(b"2", body, "prompt/a")
    await arrived(first, third)
    assert pair.arrived == {b"0": body, b"2": body}
    assert pair.chunks == 40


def wait_behind(pair: Pair, large: Outbound, names: Sequence[str]) -> None:
    """Another sender's messages of one stored part each, which wait for the memory that `large` takes."""
    assert large.sizes[1] == 60 * KIB
    for index, name in enumerate(names):
        header = b"%d" % index
        sizes = (len(header), 20 * KIB)
        offer = Offer(1000 + index, sizes, KIB, header=header, named=(Named(1, name, lasts=True),))
        pair.receiver.hear("other", offer)


async def begun(pair: Pair, outbound: Outbound) -> None:
    async with asyncio.timeout(60):
        while outbound.number not in pair.begun:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_any_number_that_wait_go_on_when_what_they_name_has_come_from_elsewhere(
    pair: Pair,
) -> None:
    large = pair.offer(b"large", bytes(60 * KIB))
    await begun(pair, large)
    wait_behind(pair, large, ["prompt/a"] * 400)
    body = random.Random(1).randbytes(20 * KIB)
    pair.kept.use("prompt/a", Buffer(body), lasting=True, new=True)
    await arrived(large)
    assert [pair.arrived[b"%d" % index] for index in range(400)] == [body] * 400
    # Memory that was kept for nobody is given back by nobody.
    assert pair.receiver._held == pair.receiver._ahead == 0


async def test_a_sender_that_is_gone_takes_along_what_of_its_waits_and_has_come_from_elsewhere(
    pair: Pair,
) -> None:
    large = pair.offer(b"large", bytes(60 * KIB))
    await begun(pair, large)
    pair.receiver.hear("other", Offer(999, (1, 60 * KIB), KIB))
    wait_behind(pair, large, ["prompt/a", "prompt/a"])
    pair.kept.use("prompt/a", Buffer(bytes(20 * KIB)), lasting=True, new=True)
    pair.receiver.forget_sender("other")
    await arrived(large)
    assert set(pair.arrived) == {b"large"}
    assert pair.receiver._held == pair.receiver._ahead == 0


hostile = st.one_of(
    st.builds(
        Offer,
        transfer=st.integers(0, 5),
        sizes=st.lists(st.integers(-(2**40), 2**40) | st.integers(-2, 4096), max_size=8).map(tuple),
        chunk=st.integers(-(2**40), 2**40) | st.integers(-1, 4096),
        header=st.binary(max_size=4),
        named=st.lists(
            st.builds(Named, st.integers(-2, 9), st.text("ab", max_size=1)), max_size=4
        ).map(tuple),
    ),
    st.builds(
        Offer,
        transfer=st.integers(0, 5),
        sizes=st.integers(1, 5000).map(lambda count: (1,) * count),
        chunk=st.just(KIB),
    ),
)


@given(offers=st.lists(hostile, max_size=12))
def test_offers_of_any_numbers_are_refused_or_take_no_more_than_the_memory(
    offers: list[Offer],
) -> None:
    asyncio.run(hear_all(offers))


async def hear_all(offers: list[Offer]) -> None:
    """A receiver hears them, and forgets their sender."""
    told: list[Notice] = []
    connection = Connection(NatsSettings(), "receiver")
    receiver = Transfers(
        connection,
        Subjects("n"),
        "receiver",
        tell=lambda _, notice: told.append(notice),
        deliver=lambda *_: None,
    )
    for offer in offers:
        before = receiver._held
        receiver.hear("other", offer)
        assert before <= receiver._held <= module.MEMORY_BYTES
        refused = offer.refusal(module.MEMORY_BYTES)
        assert (refused is None) == (told[-1:] != [Dropped(offer.transfer, refused or "")])
    # What a chunk takes to be planned is little beside what it brings, and what all parts take is
    # counted.
    planned = sum(len(inbound.places) for inbound in receiver._in.values())
    assert planned <= receiver._held / PART_BYTES
    receiver.forget_sender("other")
    assert receiver._held == receiver._ahead == len(receiver._in) == 0


async def test_an_offer_of_small_chunks_or_of_less_than_nothing_holds_nobody(pair: Pair) -> None:
    memory = 8 * KIB * KIB
    tiny_chunks = Offer(1001, (1, memory), 1)
    below_nothing = Offer(1002, (1, -memory), KIB)
    assert "chunks of 1 bytes" in (tiny_chunks.refusal(2 * memory) or "")
    assert f"a part of -{memory} bytes" in (below_nothing.refusal(2 * memory) or "")
    for offer in (tiny_chunks, below_nothing):
        pair.receiver.hear("other", offer)
    assert not pair.receiver._in
    body = random.Random(1).randbytes(20 * KIB)
    await arrived(pair.offer(b"next", body))
    assert pair.arrived == {b"next": body}
