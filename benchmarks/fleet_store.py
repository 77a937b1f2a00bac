"""What a stored prompt costs in a fleet: uploading it at one frontend, its first use at another, and its further ones.

    python -m benchmarks.fleet_store [--rounds N]

Two frontends' stores in this process and a NATS server beside it. A prompt is 2,560 rows of 1,024 float32, 10 MB, new ones each time. Prints medians, the least and the
greatest, in milliseconds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop
from tests.plane.nats_server import NatsServer
from tests.store.frontends import Frontends, seen
from tests.store.making import target

from inlay.prompt import Buffer
from inlay.tensors import ReadLimits, read, write

ROWS, HIDDEN = 2560, 1024
USES = 100
OWNER = "owner"


async def measure(server: NatsServer, rounds: int) -> None:
    """Print all figures."""
    fleet = Frontends(server)
    one, other = [await fleet.frontend(memory_bytes=1 << 28, max_bytes=1 << 30) for _ in range(2)]
    wanted = target(hidden=HIDDEN)
    took: dict[str, list[float]] = {"upload": [], "first use elsewhere": [], "further use": []}
    for seed in range(rounds):
        array = np.random.default_rng(seed).standard_normal((ROWS, HIDDEN), np.float32)
        data = Buffer(write(array, "safetensors"))
        tensor = read(data, limits=ReadLimits(max_bytes=1 << 30))
        began = time.perf_counter()
        stored = await one.store.put(OWNER, data, tensor)
        took["upload"].append(time.perf_counter() - began)
        for use in range(USES):
            began = time.perf_counter()
            await other.store.rows(OWNER, stored.id, wanted, look=seen)
            took["further use" if use else "first use elsewhere"].append(time.perf_counter() - began)
    for name, seconds in took.items():
        median, least, most = statistics.median(seconds), min(seconds), max(seconds)
        print(f"{name:20} {median * 1e3:8.2f} ms ({least * 1e3:.2f}-{most * 1e3:.2f})")
    await fleet.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory)) as server:
        uvloop.run(measure(server, rounds))


if __name__ == "__main__":
    main()
