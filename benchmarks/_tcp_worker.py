"""An echo engine behind a TCP listener, in a process of its own.

For `plane_latency` and `rpc_choice`.

    python -m benchmarks._tcp_worker MODEL_DIRECTORY < ROOT_SECRET

Prints its port and its certificate's digest, and ends with its standard input.
"""

import asyncio
import sys

import uvloop

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.tls import load_identity, make_certificate
from inlay.worker.host import EngineHost


async def run(model: str) -> None:
    """Serve until standard input ends."""
    secret = Secret(sys.stdin.buffer.read(32))
    engine = EchoEngine(
        EngineSettings.of(model=model, engine="echo", served_model_name=["m"]), secret
    )
    await engine.start()
    host = EngineHost(engine)
    identity = load_identity(make_certificate())
    endpoint = Endpoint(host, secret, identity, EmbedsCache(0), neighbours=False)
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    print(address.port, address.fingerprint.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    await endpoint.close()


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1]))
