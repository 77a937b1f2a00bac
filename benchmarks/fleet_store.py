"""What a stored prompt costs in a fleet.

Its upload, its uses at another frontend, and requests for it at a worker.

    python -m benchmarks.fleet_store [--rounds N]

Two frontends' stores in this process, a NATS server and a worker with the echo engine, whose steps
cost nothing, beside it. A prompt is 2,560 rows of 1,024 float32, 10 MB, new ones each time. Prints
medians, the least and the greatest, in milliseconds; of requests until the first token, with what
the NATS server received and sent.
"""

import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from pydantic import SecretStr
from tests.models import tiny
from tests.parts import Part
from tests.serving import free_port
from tests.store.frontends import Frontend, Frontends, seen
from tests.store.making import target
from tests.transport.nats_server import NatsServer

from benchmarks._options import parser_of
from inlay.messages.prompt import Buffer, Prompt
from inlay.messages.request import Request, Sampling
from inlay.tensors import ReadLimits, read, write
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.settings import NatsSettings

ROWS, HIDDEN = 2560, 1024
USES = 100
REQUESTS = 20
CHOICES = 8
OWNER = "owner"


def tell(name: str, seconds: Sequence[float], num_bytes: float | None = None) -> None:
    """Print a line."""
    median, least, most = statistics.median(seconds), min(seconds), max(seconds)
    moved = "" if num_bytes is None else f", {num_bytes / 1e6:.3f} MB through NATS each"
    print(f"{name:44} {median * 1e3:8.2f} ms ({least * 1e3:.2f}-{most * 1e3:.2f}){moved}")


async def upload(frontend: Frontend, seed: int) -> tuple[str, float]:
    """The id of a new prompt, and the seconds it took to keep it."""
    array = np.random.default_rng(seed).standard_normal((ROWS, HIDDEN), np.float32)
    data = Buffer(write(array, "safetensors"))
    tensor = read(data, limits=ReadLimits(max_bytes=1 << 30))
    began = time.perf_counter()
    stored = await frontend.store.put(OWNER, data, tensor)
    return stored.id, time.perf_counter() - began


async def use(frontend: Frontend, id_: str) -> Prompt:
    """The prompt for a model, as a request asks for it."""
    (rows,) = await frontend.store.rows(OWNER, id_, target(hidden=HIDDEN), look=seen)
    return Prompt.of(rows)


async def measure_stores(one: Frontend, other: Frontend, rounds: int) -> None:
    """Uploads, and uses at the frontend that did not take them."""
    took: dict[str, list[float]] = {"upload": [], "first use elsewhere": [], "further use": []}
    for seed in range(rounds):
        id_, seconds = await upload(one, seed)
        took["upload"].append(seconds)
        for number in range(USES):
            began = time.perf_counter()
            await use(other, id_)
            took["further use" if number else "first use elsewhere"].append(
                time.perf_counter() - began
            )
    for name, seconds_of in took.items():
        tell(name, seconds_of)


class Requests:
    """Asks a worker for prompts by reference.

    Args:
        plane: that knows it.
        monitoring: port where the NATS server says what it has received and sent.
    """

    def __init__(self, plane: NatsPlane, monitoring: int) -> None:
        self._plane = plane
        self._url = f"http://127.0.0.1:{monitoring}/varz"
        self._number = 0

    def moved(self) -> int:
        """Bytes the server has received and sent."""
        told = msgspec.json.decode(urllib.request.urlopen(self._url).read())
        return int(told["in_bytes"]) + int(told["out_bytes"])

    async def first_tokens(self, frontend: Frontend, id_: str, choices: int = 1) -> float:
        """Seconds until each choice of a request has its first token."""
        began = time.perf_counter()
        prompt = await use(frontend, id_)
        worker = self._plane.workers()[0]
        streams = []
        for _ in range(choices):
            self._number += 1
            # Choices are under way until the last of them is there, as real ones are.
            tokens = 2 if choices == 1 else 1000
            request = Request(
                id=str(self._number), prompts=(prompt,), params=Sampling(max_tokens=tokens)
            )
            streams.append(worker.send(request))
        firsts = []
        for stream in streams:
            deltas = aiter(stream)
            await anext(deltas)
            firsts.append(deltas)
        took = time.perf_counter() - began
        for stream, deltas in zip(streams, firsts, strict=True):
            stream.cancel()
            async for _ in deltas:
                pass
        return took


async def measure_requests(frontend: Frontend, requests: Requests, rounds: int) -> None:
    """Requests by reference at one worker, of prompts that this frontend has."""
    ids = [(await upload(frontend, 1000 + number))[0] for number in range(2 * rounds)]
    for id_ in ids:
        await use(frontend, id_)
    took: dict[str, list[float]] = {"first": [], "further": [], "choices": []}
    moved = dict.fromkeys(took, 0)

    async def ask(case: str, id_: str, choices: int = 1) -> None:
        # Checks of connections, heartbeats and the like are among what is moved.
        before = requests.moved()
        took[case].append(await requests.first_tokens(frontend, id_, choices))
        moved[case] += requests.moved() - before

    for id_ in ids[:rounds]:
        await ask("first", id_)
        for _ in range(REQUESTS):
            await ask("further", id_)
    for id_ in ids[rounds:]:
        await ask("choices", id_, CHOICES)
    names = (
        "first request of a worker for a prompt",
        "its further requests",
        f"a first one of {CHOICES} choices",
    )
    for (case, seconds), name in zip(took.items(), names, strict=True):
        tell(name, seconds, moved[case] / len(seconds))


async def measure(server: NatsServer, monitoring: int, model: str, rounds: int) -> None:
    """Print all figures."""
    fleet = Frontends(server)
    fleet.settings = NatsSettings(nats=[SecretStr(server.url)])
    words = (
        model,
        "--engine",
        "echo",
        "--served-model-name",
        "m",
        "--nats",
        server.url,
        "--enable-prompt-embeds",
    )
    worker = Part("worker", *words, until=" serves ").wait_ready()
    member = await Member.join(fleet.settings, "frontend")
    secret = await member.secret(None)
    plane = NatsPlane(member, secret)
    await plane.start()
    one, other = [
        await fleet.frontend(memory_bytes=1 << 29, max_bytes=1 << 30, secret=secret)
        for _ in range(2)
    ]
    await measure_stores(one, other, rounds)
    while not plane.workers():
        await plane.changed()
    await measure_requests(other, Requests(plane, monitoring), rounds)
    await plane.close()
    await fleet.close()
    worker.end()


def main() -> None:
    """Run it."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    monitoring = free_port()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        model.mkdir()
        shutil.copy(tiny("llama") / "tokenizer.json", model)
        (model / "config.json").write_text(
            f'{{"vocab_size": 1000, "hidden_size": {HIDDEN}, "max_position_embeddings": 100000}}'
        )
        with NatsServer(Path(directory), extra=f'http: "127.0.0.1:{monitoring}"') as server:
            uvloop.run(measure(server, monitoring, str(model), rounds))


if __name__ == "__main__":
    main()
