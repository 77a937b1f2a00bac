"""An echo engine behind a TCP listener, in a process of its own.

For `plane_latency` and `rpc_choice`.

    python -m benchmarks._tcp_worker MODEL_DIRECTORY < ROOT_SECRET

Prints its port and its certificate's digest, and ends with its standard input.
"""

import asyncio
import sys

import uvloop

from inlay.digest import Secret
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.transport import Connection, Listener, ReceiveMemory
from inlay.transport.local import serve
from inlay.transport.messages import ToWorker
from inlay.transport.tls import make_identity
from inlay.worker.host import EngineHost

MEMORY_BYTES = 1 << 30


async def run(model: str) -> None:
    """Serve until standard input ends."""
    secret = Secret(sys.stdin.buffer.read(32))
    engine = EchoEngine(EngineSettings(model=model, engine="echo", served_model_name=["m"]), secret)
    await engine.start()
    host = EngineHost(engine)
    identity = make_identity()
    serving: set[asyncio.Task[None]] = set()

    def accepted(connection: Connection[ToWorker]) -> None:
        task = asyncio.create_task(serve(connection, host))
        serving.add(task)
        task.add_done_callback(serving.discard)

    listener = Listener(
        secret,
        ToWorker,
        ReceiveMemory(MEMORY_BYTES),
        accepted,
        tls=identity.context,
        fingerprint=identity.fingerprint,
    )
    port = await listener.listen("127.0.0.1", 0)
    print(port, identity.fingerprint.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    listener.close()


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1]))
