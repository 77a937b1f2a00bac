"""A process that asks a worker for the same pages again and again, until it is killed.

    python -m tests.engine.torch.page_asker ADDRESS QUERY

Both are msgpack in hexadecimal digits. It says "asked" once a first answer has come.
"""

import asyncio
import sys
from itertools import count

import msgspec

from inlay.base.address import Address
from inlay.messages.digest import Secret
from inlay.messages.request import PageQuery, Request, Task
from inlay.transport.peers import PeerConnections

AT_ONCE = 8


async def ask(address: Address, query: PageQuery) -> None:
    peers, numbers = PeerConnections(Secret(bytes(range(32)))), count()

    async def again() -> None:
        while True:
            request = Request(id=str(next(numbers)), task=Task.PAGES, prompts=(), params=query)
            (payload,) = await peers.payloads(address, request)
            if request.id == "0":
                print("asked", len(payload.data), flush=True)

    await asyncio.gather(*(again() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    given = (bytes.fromhex(part) for part in sys.argv[1:])
    asyncio.run(
        ask(
            msgspec.msgpack.decode(next(given), type=Address),
            msgspec.msgpack.decode(next(given), type=PageQuery),
        )
    )
