"""A process that has computed a prompt and gives its pages: `python -m` this, with a model's path.

With "tcp" behind it, the process gives neighbours no shared memory. It prints its address (host, port, fingerprint) and its output as JSON, then serves until it ends.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from inlay.base.address import Address
from inlay.messages.prompt import Prompt, Tokens
from inlay.transport import wire
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.tls import load_identity, make_certificate
from inlay.worker.host import EngineHost
from tests.engine.conformance import SECRET, ids, make_request
from tests.engine.torch.test_page_exchange import answers, settings, started

PROMPT = Prompt.of(Tokens(ids(1, 150)))


class Ready(msgspec.Struct):
    """Said by the process when it serves."""

    address: Address
    output: list[int]


async def _serve(directory: Path, *, neighbours: bool) -> None:
    async with started(settings(directory)) as (engine,):
        output, _ = await answers(engine, make_request("truth", PROMPT))
        identity = load_identity(make_certificate())
        endpoint = Endpoint(
            EngineHost(engine), SECRET, identity, EmbedsCache(0), neighbours=neighbours
        )
        address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
        sys.stdout.buffer.write(msgspec.json.encode(Ready(address, output)) + b"\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    # Its small pages go as large ones do: into shared memory, where there is any.
    wire.CHUNK_BYTES = 512
    asyncio.run(_serve(Path(sys.argv[1]), neighbours=sys.argv[2:] != ["tcp"]))
