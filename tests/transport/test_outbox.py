"""Outputs of a worker whose frontend does not keep up."""

import asyncio
import socket
from typing import Any

from inlay.messages.request import Output
from inlay.transport.local.arena import Arena
from inlay.transport.local.channel import LocalTransport
from inlay.transport.messages import FromWorker, Outputs
from inlay.transport.serve import Outbox

MANY = 40_000


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
