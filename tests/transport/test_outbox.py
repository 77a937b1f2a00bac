"""Outputs of a worker: in order for each request, also where its frontend does not keep up."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import msgspec
import pytest

from inlay.messages.card import Address
from inlay.messages.prompt import Buffer
from inlay.messages.request import Output, Payload
from inlay.transport.listener import dial
from inlay.transport.local.arena import Arena
from inlay.transport.local.channel import LocalTransport
from inlay.transport.memory import ReceiveMemory
from inlay.transport.messages import FromWorker, Outputs
from inlay.transport.serve import Outbox
from inlay.transport.wire import CHUNK_BYTES, MAX_PARTS
from tests.transport.test_transport import SECRET, Ends

MANY = 40_000
_EACH = 200


async def test_what_one_request_makes_delays_another_by_few_messages() -> None:
    ends = socket.socketpair()
    arena = Arena(1 << 20)
    try:
        worker: LocalTransport[Any] = await LocalTransport.open(
            ends[0], arena, FromWorker, sends_shared=False
        )
        frontend: LocalTransport[Any] = await LocalTransport.open(
            ends[1], arena, FromWorker, sends_shared=True
        )
        reading: Any = frontend._writer.transport
        reading.pause_reading()
        outbox = Outbox(worker, lambda request_id: None)
        for number in range(MANY):
            outbox.put(Output("fast", 0, number, (number,)))
            if number % 8 == 0:
                await asyncio.sleep(0)
        outbox.put(Output("other", 0, 0, (7,)))
        reading.resume_reading()
        ids: list[int] = []
        count = 0
        other = None
        async with asyncio.timeout(60):
            while other is None or len(ids) < MANY:
                match await frontend.receive():
                    case Outputs(outputs):
                        for output in outputs:
                            count += 1
                            if output.request_id == "other":
                                other = count
                            else:
                                assert output.offset == len(ids)
                                ids += output.token_ids
        assert ids == list(range(MANY))
        # What had left before the frontend stood still, and little more.
        assert other < MANY // 2
        worker.close()
        frontend.close()
    finally:
        arena.close()


@pytest.mark.parametrize("neighbours", [False, True], ids=["tcp", "neighbours"])
async def test_outputs_of_a_request_come_in_order_however_large_each_is(neighbours: bool) -> None:
    random = Random(5)
    large = Buffer(os.urandom(3 * CHUNK_BYTES))
    async with Ends.open(neighbours=neighbours) as ends:
        address = Address("127.0.0.1", ends.port, ends.identity.fingerprint)
        frontend: Any = await dial(address, SECRET, FromWorker, ReceiveMemory(1 << 28))
        worker: Any = await ends.accepted.get()
        ends.opened += [frontend, worker]
        outbox = Outbox(worker, lambda request_id: None)
        came: dict[str, list[int]] = {str(number): [] for number in range(4)}
        whole = asyncio.Event()

        def take(message: object) -> None:
            assert isinstance(message, Outputs)
            for output in message.outputs:
                came[output.request_id] += output.token_ids
            if all(len(ids) == _EACH for ids in came.values()):
                whole.set()

        reading = asyncio.create_task(frontend.deliver(take))
        for offset in range(_EACH):
            for id_ in came:
                sized = random.random() < 0.05
                payloads = (Payload("states", "uint8", (len(large),), large),) if sized else ()
                outbox.put(Output(id_, 0, offset, (offset,), payloads=payloads))
            if random.random() < 0.5:
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await whole.wait()
        assert came == {id_: list(range(_EACH)) for id_ in came}
        assert not outbox._leaving
        reading.cancel()


async def test_what_fills_a_large_message_together_is_overtaken_by_none_of_it() -> None:
    many = 4 * CHUNK_BYTES // len(msgspec.msgpack.encode(Output("0", 0, 0, (0,))))
    async with Ends.open() as ends:
        address = Address("127.0.0.1", ends.port, ends.identity.fingerprint)
        frontend: Any = await dial(address, SECRET, FromWorker, ReceiveMemory(1 << 28))
        worker: Any = await ends.accepted.get()
        ends.opened += [frontend, worker]
        outbox = Outbox(worker, lambda request_id: None)
        outbox.running |= {str(number) for number in range(many)}
        for number in range(many):
            outbox.put(Output(str(number), 0, 0, (number,)))
        await asyncio.sleep(0)
        outbox.put(Output("0", 0, 1, (7,)))
        outbox.put(Output("other", 0, 0, (8,)))
        came: list[tuple[str, int]] = []
        async with asyncio.timeout(60):
            while len(came) < many + 2:
                message = await frontend.receive()
                came += [(output.request_id, output.offset) for output in message.outputs]
        # Another request waits for none of it.
        assert came[0] == ("other", 0)
        assert came[-1] == ("0", 1)


async def test_what_cannot_be_sent_together_keeps_its_order_too() -> None:
    """One message with too many buffers, beside large ones of another request."""
    many = tuple(Payload("x", "uint8", (1,), Buffer(b"x")) for _ in range(MAX_PARTS - 2))
    async with Ends.open() as ends:
        frontend, outbox = await _frontend_and_outbox(ends, ReceiveMemory(1 << 28))
        outbox.put(_large("a", 0, 40 * CHUNK_BYTES))
        outbox.put(Output("b", 0, 0, (0,), payloads=many))
        outbox.put(Output("c", 0, 0, (0,), payloads=many))
        outbox.put(_large("a", 1, 3 * CHUNK_BYTES))
        outbox.put(Output("a", 0, 2, (2,), finish_reason="stop"))
        came = [(each.request_id, each.offset) async for each in _outputs(frontend, 5)]
        assert [offset for id_, offset in came if id_ == "a"] == [0, 1, 2]
        assert sorted(came) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0)]


async def test_tokens_do_not_wait_for_the_memory_that_another_requests_payload_needs() -> None:
    async with Ends.open() as ends:
        frontend, outbox = await _frontend_and_outbox(ends, ReceiveMemory(4 << 20))
        outbox.put(_large("slow", 0, 3 << 20))
        # Its client reads slowly: there is no memory for the next one.
        kept = await frontend.receive()
        outbox.put(_large("slow", 1, 3 << 20))
        outbox.put(Output("chat", 0, 0, (0,)))
        outbox.put(Output("slow", 0, 2, (2,), finish_reason="stop"))
        await asyncio.sleep(0)
        outbox.put(Output("chat", 0, 1, (1,), finish_reason="stop"))
        came = [(each.request_id, each.offset) async for each in _outputs(frontend, 2)]
        assert came == [("chat", 0), ("chat", 1)]
        del kept
        came = [(each.request_id, each.offset) async for each in _outputs(frontend, 2)]
        assert came == [("slow", 1), ("slow", 2)]


async def test_payloads_that_are_not_large_do_not_fill_the_connection() -> None:
    """Many that came in one turn; tokens that come after them need not wait for all of them."""
    many = 800
    async with Ends.open() as ends:
        frontend, outbox = await _frontend_and_outbox(ends, ReceiveMemory(1 << 28))
        for number in range(many):
            outbox.put(_large(str(number), 0, 100_000))
        await asyncio.sleep(0)
        outbox.put(Output("chat", 0, 0, (0,), finish_reason="stop"))
        came = [each.request_id async for each in _outputs(frontend, many + 1)]
        assert came[0] == "chat"
        assert sorted(came[1:]) == sorted(str(number) for number in range(many))


async def _frontend_and_outbox(ends: Ends, memory: ReceiveMemory) -> tuple[Any, Outbox]:
    address = Address("127.0.0.1", ends.port, ends.identity.fingerprint)
    frontend: Any = await dial(address, SECRET, FromWorker, memory)
    worker: Any = await ends.accepted.get()
    ends.opened += [frontend, worker]
    return frontend, Outbox(worker, lambda request_id: None)


def _large(request_id: str, offset: int, size: int) -> Output:
    payload = Payload("states", "uint8", (size,), Buffer(os.urandom(size)))
    return Output(request_id, 0, offset, (offset,), payloads=(payload,))


async def _outputs(frontend: Any, count: int) -> AsyncIterator[Output]:
    """So many outputs as they come."""
    async with asyncio.timeout(60):
        while count > 0:
            for output in (await frontend.receive()).outputs:
                count -= 1
                yield output
